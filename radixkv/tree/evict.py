"""Eviction of a tree's leaves in the order of its policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from radixkv.tree.digest import Digest, digest_at
from radixkv.tree.eviction import EvictionPolicy
from radixkv.tree.forest import Forest
from radixkv.tree.node import Namespace


class EvictedRun(NamedTuple):
    """Consecutive pages that were evicted together."""

    namespace: Namespace
    digests: Sequence[int]
    """The chained digest of each page."""
    tokens: bytes
    """The run's tokens, little-endian int32."""
    pages: list[int]
    """Indices of the freed pages, in token order."""


def evict_leaves(
    forest: Forest,
    policy: EvictionPolicy,
    digest: Digest,
    n_pages: int,
    quotas: Mapping[str, int] | None,
    n_beyond: int,
) -> Iterator[EvictedRun]:
    """Frees pages and yields them, as ``RadixTree.evict`` does."""
    left = None if quotas is None else dict(quotas)
    while n_pages > 0 and (leaves := forest.evictable.candidates(left)):
        index = policy.victim(leaves)
        leaf = leaves[index]
        namespace, group = leaf.namespace, forest.evictable.group_of(leaf)
        n_most = len(leaf.pages) if left is None else min(len(leaf.pages), left[group])
        ends_leaf = n_most == len(leaf.pages) <= n_pages + n_beyond
        n_evicted = n_most if ends_leaf else min(n_pages, n_most)
        n_kept = len(leaf.pages) - n_evicted
        digest_at(digest, leaf, len(leaf.pages), forest.page_bytes)
        digests = leaf.digests[n_kept:]
        if policy.remembers:
            policy.remember(leaf, digests, forest.n_leased + forest.n_evictable)
        if not n_kept:
            leaves.pop(index)
        tokens, pages = forest.truncate(leaf, n_kept)
        n_pages -= n_evicted
        if left is not None:
            left[group] -= n_evicted
        yield EvictedRun(namespace, digests, tokens, pages)
