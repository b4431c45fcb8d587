"""The leaves of a tree that can be evicted, in the order of their eviction."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.tree.node import Node


class EvictableLeaves:
    """The leaves without a lease, smallest rank first; those that a retention covers come after all others."""

    def __init__(self) -> None:
        self._ordinary = SortedKeyList(key=attrgetter("rank", "serial"))
        self._retained = SortedKeyList(key=attrgetter("rank", "serial"))

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._retained)

    def __iter__(self) -> Iterator[Node]:
        yield from self._ordinary
        yield from self._retained

    def add(self, leaf: Node) -> None:
        """Adds a leaf. O(log leaves)."""
        self._leaves_like(leaf).add(leaf)

    def remove(self, leaf: Node) -> None:
        """Removes a leaf, before its rank or the count of its retentions changes. O(log leaves)."""
        self._leaves_like(leaf).remove(leaf)

    def candidates(self) -> SortedKeyList:
        """Returns the leaves of which the next one is evicted: the retained ones only if there are no others."""
        return self._ordinary or self._retained

    def _leaves_like(self, leaf: Node) -> SortedKeyList:
        return self._retained if leaf.n_retentions else self._ordinary
