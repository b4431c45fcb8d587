"""Search for runs of pages that several leases have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.tree.node import Lease, Node


class SharedLeases(NamedTuple):
    """Consecutive pages that two or more leases have in common."""

    leases: tuple[int, ...]
    """Indices of the leases in the argument of ``find_shared_runs``, ascending."""
    first_page: int
    """Index of the run's first page in the path of each of the leases."""
    n_pages: int


def find_shared_runs(leases: Sequence[Lease | None]) -> list[SharedLeases]:
    """Returns every maximal run of pages that the same two or more leases share. O(edges).

    Ordered by first lease, then by first page. Runs nest: a run of more leases comes before the runs that some of
    those leases share after it. None stands for a request without a lease, and shares nothing.
    """
    leases_by_end: dict[Node, list[int]] = {}
    """By the last node of each lease that others hold, too: the node's leases, in order of their first one."""
    for index, lease in enumerate(leases):
        if lease is None:
            continue
        node = lease.node
        while node.n_leases == 1 and node.parent is not None:
            node = node.parent
        if node in leases_by_end:
            leases_by_end[node].append(index)
        elif node.parent is not None:  # a root has no page to share
            leases_by_end[node] = [index]

    leases_of: dict[Node, list[int]] = {}
    """In order of each node's first lease, parents before children."""
    for end_node, indices in leases_by_end.items():
        for node in _path_to(end_node):
            leases_of.setdefault(node, []).extend(indices)

    starts: list[tuple[tuple[int, ...], int]] = []
    ends: list[int] = []
    end_of: dict[Node | None, int] = {}
    previous, n_previous = None, 0
    for node, sharers in leases_of.items():
        if len(sharers) == 1:
            continue
        first_page = end_of.get(node.parent, 0)
        end = end_of[node] = first_page + len(node.pages)
        if node.parent is previous and len(sharers) == n_previous:
            ends[-1] = end
        else:
            starts.append((tuple(sorted(sharers)), first_page))
            ends.append(end)
        previous, n_previous = node, len(sharers)
    return [
        SharedLeases(sharers, first_page, end - first_page)
        for (sharers, first_page), end in zip(starts, ends, strict=True)
    ]


def _path_to(end: Node) -> list[Node]:
    """Returns the path to ``end``, parents first, without the root, which has no pages."""
    path: list[Node] = []
    node = end
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path
