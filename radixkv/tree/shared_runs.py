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
    n_pages: int


def find_shared_runs(leases: Sequence[Lease | None]) -> list[SharedRun]:
    """Every run that the same two or more leases hold, as long as it can be, ordered by first lease and page.

    Runs nest: a run that all share comes before those that fewer of them share behind it. None holds nothing.
    O(edges).
    """
    holders: dict[Node, list[int]] = {}
    """By first lease, and of those with one first lease from above."""
    for index, lease in enumerate(leases):
        if lease is None:
            continue
        node = lease.node
        while node.n_leases == 1 and node.parent is not None:
            node = node.parent
        if node.parent is None:
            continue  # shares no page
        if node not in holders:
            for unseen in _path_to(node):
                holders.setdefault(unseen, [])
        while node.parent is not None:
            holders[node].append(index)
            node = node.parent

    begins: list[tuple[tuple[int, ...], int]] = []
    ends: list[int] = []
    end_of: dict[Node | None, int] = {}
    above, n_above = None, 0
    for node, found in holders.items():
        if len(found) == 1:
            continue
        first_page = end_of.get(node.parent, 0)
        end = end_of[node] = first_page + len(node.pages)
        if node.parent is above and len(found) == n_above:
            ends[-1] = end
        else:
            begins.append((tuple(found), first_page))
            ends.append(end)
        above, n_above = node, len(found)
    return [SharedRun(found, first, end - first) for (found, first), end in zip(begins, ends, strict=True)]


def _path_to(end: Node) -> list[Node]:
    """From above; without the root, in which there is no page."""
    path: list[Node] = []
    node = end
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path
