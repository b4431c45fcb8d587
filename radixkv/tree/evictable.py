"""The leaves of a tree that can be evicted, in the order of their eviction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from heapq import merge
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.tree.node import Node

_KEY = attrgetter("rank", "serial")
OTHERS = ""
"""Group of the leaves that are not counted apart."""


class EvictableLeaves:
    """The leaves without a lease, smallest rank first; those that a retention covers come after all others.

    *Spared* leaves are no candidates until their sparing ends.

    Args:
        groups: those whose leaves are apart, so that they can be evicted alone, or spared.
    """

    def __init__(self, groups: Collection[str] = ()) -> None:
        self._ordinary = {group: SortedKeyList(key=_KEY) for group in (OTHERS, *groups)}
        self._retained = {group: SortedKeyList(key=_KEY) for group in (OTHERS, *groups)}
        self._is_divided = bool(groups)
        self.spared: set[Node] = set()
        """Read-only outside; ``spare`` adds to it."""

    def __len__(self) -> int:
        return sum(map(len, (*self._ordinary.values(), *self._retained.values(), self.spared)))

    def __iter__(self) -> Iterator[Node]:
        spared = sorted(self.spared, key=_KEY)
        yield from merge(*self._ordinary.values(), (leaf for leaf in spared if not leaf.n_retentions), key=_KEY)
        yield from merge(*self._retained.values(), (leaf for leaf in spared if leaf.n_retentions), key=_KEY)

    def add(self, leaf: Node) -> None:
        """Adds a leaf. O(log leaves)."""
        self._leaves_like(leaf).add(leaf)

    def remove(self, leaf: Node) -> None:
        """Removes a leaf, before its rank or the count of its retentions changes. O(log leaves)."""
        if leaf in self.spared:
            self.spared.remove(leaf)
        else:
            self._leaves_like(leaf).remove(leaf)

    def spare(self, leaf: Node) -> None:
        """Makes a leaf that was added no candidate, until it is removed or its sparing ends. O(log leaves)."""
        self._leaves_like(leaf).remove(leaf)
        self.spared.add(leaf)

    def end_sparing(self, leaf: Node) -> None:
        """Makes a spared leaf a candidate again. O(log leaves)."""
        self.spared.remove(leaf)
        self._leaves_like(leaf).add(leaf)

    def group_of(self, leaf: Node) -> str:
        """Returns the group of a leaf if its leaves are apart, or else ``""``. O(1)."""
        return leaf.namespace.group if self._is_divided and leaf.namespace.group in self._ordinary else OTHERS

    def candidates(self, quotas: Mapping[str, int] | None = None) -> SortedKeyList:
        """Returns the leaves among which the next victim is chosen: the retained ones only if there are no others.

        Of several groups it is the one whose first leaf has the smallest rank. O(1), or O(groups).

        Args:
            quotas: the pages that may be evicted of each group; groups without any are left out. None: all may be.
        """
        if quotas is None and not self._is_divided:
            return self._ordinary[OTHERS] or self._retained[OTHERS]
        for leaves in (self._ordinary, self._retained):
            groups = [
                leaves[group] for group in leaves if leaves[group] and (quotas is None or quotas.get(group, 0) > 0)
            ]
            if groups:
                return min(groups, key=lambda group: _KEY(group[0]))
        return SortedKeyList(key=_KEY)

    def _leaves_like(self, leaf: Node) -> SortedKeyList:
        return (self._retained if leaf.n_retentions else self._ordinary)[self.group_of(leaf)]
