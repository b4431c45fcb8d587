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


def find_shared_runs(leases: Sequence[Lease | None], page_size: int) -> list[SharedRun]:
    """Every run that the same two or more leases hold, as long as it can be, ordered by first lease and page.

    Runs nest: a run that all share comes before those that fewer of them share behind it. None holds nothing.
    O(edges + shared edges log shared edges).
    """
    holders: dict[Node, list[int]] = {}
    first_pages: dict[Node, int] = {}
    for index, lease in enumerate(leases):
        if lease is None:
            continue
        node, first_page = lease.node, lease.n_tokens // page_size
        while node.parent is not None:
            first_page -= len(node.pages)
            if node.n_leases > 1:
                if node in holders:
                    holders[node].append(index)
                else:
                    holders[node], first_pages[node] = [index], first_page
            node = node.parent

    # By first lease and page, a path's nodes with one first lease follow one another from above.
    shared = sorted((found[0], first_pages[node], node) for node, found in holders.items() if len(found) > 1)
    runs: list[SharedRun] = []
    above: Node | None = None
    for _, first_page, node in shared:
        found, n_pages = holders[node], len(node.pages)
        if above is not None and node.parent is above and len(holders[above]) == len(found):
            runs[-1] = runs[-1]._replace(n_pages=runs[-1].n_pages + n_pages)
        else:
            runs.append(SharedRun(tuple(found), first_page, n_pages))
        above = node
    return runs
