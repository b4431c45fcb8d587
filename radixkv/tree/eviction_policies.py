"""Eviction policies: which of a tree's evictable leaves goes next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from sortedcontainers import SortedKeyList

from radixkv.settings.config import EvictionPolicyName
from radixkv.tree.node import Node, upwards
from radixkv.tree.reuse_rates import ReuseRates

_CLOCK_BITS = 48
"""Low bits of a rank of two parts: the time of the last use, which breaks ties between equal high parts."""
_N_CLASSES = 6
"""Classes of ``AdaptiveEviction``: nodes with 0 to 4 hits, and those with more."""


class EvictionPolicy(Protocol):
    """Decides which evictable leaf of a tree goes next. Each tree has a policy object of its own.

    A policy gives each used node a ``rank``. The tree keeps its evictable leaves in the order of their ranks, and
    evicts leaves only: no page goes before those that follow it. A policy must not change a rank while the node is
    evictable. Negative ranks are those of demoted nodes, which go before all others whatever the policy.

    The time that a policy sees is the number of uses of the tree.
    """

    remembers: bool = False
    """Whether the policy remembers evicted pages: whether the tree calls ``remember`` and ``recall``."""

    def use(self, end: Node) -> None:
        """Ranks the nodes of the path that ends at ``end``, which a request has used until now. O(edges)."""

    def hit(self, nodes: Sequence[Node]) -> None:
        """Notes that a request has found these nodes, which its lease holds already. O(nodes)."""
        return

    def victim(self, leaves: SortedKeyList) -> int:
        """Returns the index of the leaf that is evicted now, as a whole or its last pages. O(log leaves).

        Args:
            leaves: the evictable leaves, at least one, by rank; equal ranks in the order of the nodes' creation.
        """
        return 0

    def remember(self, leaf: Node, digests: Sequence[int], n_cached: int) -> None:
        """Notes that the last pages of a leaf are evicted. O(pages).

        Args:
            leaf: the leaf, with its pages.
            digests: chained digests of the pages that are evicted.
            n_cached: reachable pages of the tree, with those.
        """
        return

    def recall(self, digests: Sequence[int]) -> list[int]:
        """Returns the number of hits with which each of these pages comes into the tree. O(pages).

        Args:
            digests: chained digests of the pages.
        """
        return [0] * len(digests)

    def age(self, node: Node) -> int | None:
        """Returns the uses of the tree since the last one of a node. O(1).

        None if the node is demoted, or if ages do not count.
        """
        return None


class LruEviction(EvictionPolicy):
    """Evicts the least recently used leaf."""

    def __init__(self) -> None:
        self._clock = 0

    def use(self, end: Node) -> None:
        """Ranks the nodes of the path by the time."""
        self._clock = rank = self._clock + 1
        for node in upwards(end):
            node.rank = rank

    def age(self, node: Node) -> int | None:
        """Returns the uses of the tree since the last one of a node."""
        return None if node.rank < 0 else self._clock - node.rank


class LfudaEviction(EvictionPolicy):
    """Evicts the leaf with the smallest priority: its uses plus the age of the cache at the last of them.

    LFU with dynamic aging: the age is the priority of the last leaf that it chose. So frequently used pages stay
    longer, and those that are not used any more go once the age has passed them. Of equal priorities, the least
    recently used goes first.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._age = 0

    def use(self, end: Node) -> None:
        """Ranks the nodes of the path by priority, then by the time."""
        self._clock += 1
        for node in upwards(end):
            node.rank = (node.n_hits + 1 + self._age << _CLOCK_BITS) + self._clock

    def hit(self, nodes: Sequence[Node]) -> None:
        """Counts a hit of each node."""
        for node in nodes:
            node.n_hits += 1

    def victim(self, leaves: SortedKeyList) -> int:
        """Returns the first leaf, and sets the age to its priority."""
        leaf: Node = leaves[0]
        self._age = max(self._age, leaf.rank >> _CLOCK_BITS)
        return 0

    def age(self, node: Node) -> int | None:
        """Returns the uses of the tree since the last one of a node."""
        return None if node.rank < 0 else _since_use(node, self._clock)


class AdaptiveEviction(EvictionPolicy):
    """Evicts the leaf that is expected to give the fewest hits for the time that it stays.

    Leaves are in six classes by their number of hits, least recently used first in each. What a class is worth at
    an age is learnt from the traffic (``ReuseRates``); of the classes' first leaves, the one that is worth least is
    evicted. Evicted pages are remembered for some time. So the policy sees which are used again after their
    eviction, and a page that comes back has its hits again. Before anything is learnt, and with
    nothing remembered, this is about ``lru``. See docs/decisions/0025-eviction-policies.md.

    Args:
        ghost_capacity: how many evicted pages are remembered, as a multiple of the most pages cached. A remembered
            page takes about 130 bytes.
    """

    remembers = True

    def __init__(self, ghost_capacity: float) -> None:
        self._ghost_capacity = ghost_capacity
        self._clock = 0
        self._max_cached = 0
        self._rates = ReuseRates(_N_CLASSES)
        self._evicted: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Hits and time of the last use of remembered pages, by their digests; those evicted first come first."""

    def use(self, end: Node) -> None:
        """Ranks the nodes of the path by class, then by the time."""
        self._clock += 1
        for node in upwards(end):
            node.rank = (_class(node.n_hits) << _CLOCK_BITS) + self._clock

    def hit(self, nodes: Sequence[Node]) -> None:
        """Counts a hit of each node, and learns from its age."""
        for node in nodes:
            if node.rank >= 0:
                age = 0 if node.n_leases > 1 else self._age(node)
                self._rates.add(_class(node.n_hits), age, len(node.pages), were_used=True)
            node.n_hits += 1

    def victim(self, leaves: SortedKeyList) -> int:
        """Returns the first leaf of the class whose first leaf is worth least. O(classes · log leaves)."""
        first: Node = leaves[0]
        if first.rank < 0:
            return 0
        if 4 * self._rates.n_new >= self._max_cached:
            self._rates.update()
        victim, index, least = 0, 0, (float("inf"), 0)
        while index < len(leaves):
            leaf: Node = leaves[index]
            group = leaf.rank >> _CLOCK_BITS
            age = self._age(leaf)
            worth = self._rates.rate(group, age), -age
            if worth < least:
                victim, least = index, worth
            index = leaves.bisect_key_left((group + 1 << _CLOCK_BITS, 0))
        return victim

    def remember(self, leaf: Node, digests: Sequence[int], n_cached: int) -> None:
        """Keeps the pages' hits unless the leaf is demoted; of too many pages, forgets those evicted first."""
        self._max_cached = max(self._max_cached, n_cached)
        if leaf.rank < 0:
            return
        # If a copy of the page is remembered already, the newer record replaces it.
        record = leaf.n_hits, self._clock - self._age(leaf)
        for digest in digests:
            self._evicted.pop(digest, None)
            self._evicted[digest] = record
        while len(self._evicted) > self._ghost_capacity * self._max_cached:
            _, (n_hits, used_at) = self._evicted.popitem(last=False)
            self._rates.add(_class(n_hits), self._clock - used_at, 1, were_used=False)

    def recall(self, digests: Sequence[int]) -> list[int]:
        """Counts a hit of each remembered page, and forgets that it was evicted."""
        return [self._recall(digest) for digest in digests]

    def _recall(self, digest: int) -> int:
        record = self._evicted.pop(digest, None)
        if record is None:
            return 0
        n_hits, used_at = record
        self._rates.add(_class(n_hits), self._clock - used_at, 1, were_used=True)
        return n_hits + 1

    def age(self, node: Node) -> int | None:
        """Returns the uses of the tree since the last one of a node."""
        return None if node.rank < 0 else self._age(node)

    def _age(self, node: Node) -> int:
        return _since_use(node, self._clock)


def open_eviction_policy(name: EvictionPolicyName, ghost_capacity: float) -> EvictionPolicy:
    """Returns a new policy object, for one tree.

    Args:
        name: the policy.
        ghost_capacity: that of ``AdaptiveEviction``; the other policies remember nothing.
    """
    if name == "lru":
        return LruEviction()
    if name == "lfuda":
        return LfudaEviction()
    return AdaptiveEviction(ghost_capacity)


def _since_use(node: Node, clock: int) -> int:
    """Returns the time since the last use of a node that is not demoted, and whose rank has two parts."""
    return clock - (node.rank & (1 << _CLOCK_BITS) - 1)


def _class(n_hits: int) -> int:
    return min(n_hits, _N_CLASSES - 1)
