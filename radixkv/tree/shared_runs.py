"""Search for runs of pages that several leases have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Node, path_to, require_open


class SharedLeases(NamedTuple):
    """Consecutive pages that two or more leases have in common."""

    leases: tuple[int, ...]
    """Indices of the leases in the argument of ``SharedRuns.find``, ascending."""
    first_page: int
    """Index of the run's first page in the path of each of the leases."""
    n_pages: int


class SharedRuns:
    """Finds the runs of pages that leases have in common.

    ``Lease.branch`` is a node of the lease's path below which no other lease holds a page of the path. ``find``
    sets it where it is missing. It stays true while others let go of nodes. Once any node with one lease has got a
    second one (``Forest.n_joins``), ``find`` forgets all branches. A lease that gains nodes gets a new branch.

    Args:
        forest: the nodes of the leases, with the counter ``n_joins``.
        leases: the open leases.
    """

    def __init__(self, forest: Forest, leases: Collection[Lease]) -> None:
        self._forest = forest
        self._leases = leases
        self._n_joins = 0

    def find(self, leases: Sequence[Lease | None]) -> list[SharedLeases]:
        """Returns every maximal run of pages that the same two or more leases share.

        Ordered by first lease, then by first page. Runs nest: a run of more leases comes before the runs that some
        of those leases share after it. O(leases + edges above branches), and O(edges) of the leases that are new.

        Args:
            leases: open leases, each once. None stands for a request without a lease, and shares nothing.

        Raises:
            InvariantError: a lease was released.
        """
        if self._n_joins != self._forest.n_joins:
            self._n_joins = self._forest.n_joins
            for lease in self._leases:
                lease.branch = None
        # This runs whenever a row comes or goes: so it has few steps of the interpreter for each lease, and nearly
        # all leases have noted their branch when they found their prefix.
        branches = [None if lease is None else lease.branch for lease in leases]
        if not all(branches):
            for index, branch in enumerate(branches):
                if branch is None and (new := leases[index]) is not None:
                    branches[index] = new.branch = branch_of(new)
        if len(branches) < 2:
            return []
        if branches.count(branches[0]) == len(branches):
            n_pages = sum(len(node.pages) for node in path_to(branches[0]))
            return [SharedLeases(tuple(range(len(branches))), 0, n_pages)] if n_pages else []
        by_branch: defaultdict[Node | None, list[int]] = defaultdict(list)
        for index, branch in enumerate(branches):
            by_branch[branch].append(index)
        return _runs(by_branch)


def branch_of(lease: Lease) -> Node:
    """Returns the last node of a lease's path that other leases hold, too; the root if there is none. O(edges)."""
    require_open(lease)
    node = lease.node
    while node.n_leases == 1 and (parent := node.parent) is not None:
        node = parent
    return node


def _runs(leases_by_branch: Mapping[Node | None, list[int]]) -> list[SharedLeases]:
    """Returns the runs of leases by the node where they branch off, in order of each node's first lease."""
    leases_of: dict[Node, list[int]] = {}
    """In order of each node's first lease, parents before children."""
    for branch, indices in leases_by_branch.items():
        for node in path_to(branch)[1:]:
            leases_of.setdefault(node, []).extend(indices)

    runs: list[SharedLeases] = []
    end_of: dict[Node | None, int] = {}
    previous, n_previous = None, 0
    for node, sharers in leases_of.items():
        if len(sharers) == 1:
            continue
        first_page = end_of.get(node.parent, 0)
        end = end_of[node] = first_page + len(node.pages)
        if node.parent is previous and len(sharers) == n_previous:
            runs[-1] = runs[-1]._replace(n_pages=end - runs[-1].first_page)
        else:
            runs.append(SharedLeases(tuple(sorted(sharers)), first_page, end - first_page))
        previous, n_previous = node, len(sharers)
    return runs
