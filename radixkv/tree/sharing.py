"""Which leases have a run of pages in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.tree.node import Lease, Node


class SharedRun(NamedTuple):
    """Pages that the same leases, two or more, hold one after another."""

    leases: tuple[int, ...]
    """Indices into the leases that were asked about, ascending."""
    first_page: int
    """The run's first page, counted from the start of the path."""
    pages: tuple[int, ...]


def find_shared_runs(leases: Sequence[Lease]) -> list[SharedRun]:
    """Every run that the same two or more leases hold, as long as it can be, ordered by first lease and page.

    Runs nest: a run that all share comes before those that fewer of them share behind it. O(edges + pages shared).
    """
    paths: list[list[Node]] = []
    holders: dict[Node, list[int]] = {}
    for index, lease in enumerate(leases):
        path: list[Node] = []
        node: Node | None = lease.node
        while node is not None and node.parent is not None:
            path.append(node)
            holders.setdefault(node, []).append(index)
            node = node.parent
        path.reverse()
        paths.append(path)

    runs: list[SharedRun] = []
    for index, path in enumerate(paths):
        pages: list[int] = []
        first_page = n_pages = 0
        group: list[int] = []
        for node in path:
            holding = holders[node]
            if holding != group:
                _add(runs, index, group, first_page, pages)
                group, first_page, pages = holding, n_pages, []
            if len(group) > 1 and group[0] == index:
                pages += node.pages
            n_pages += len(node.pages)
        _add(runs, index, group, first_page, pages)
    return runs


def _add(runs: list[SharedRun], index: int, group: list[int], first_page: int, pages: list[int]) -> None:
    if len(group) > 1 and group[0] == index:
        runs.append(SharedRun(tuple(group), first_page, tuple(pages)))
