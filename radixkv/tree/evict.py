"""Eviction of a tree's leaves in the order of its policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from radixkv.tree.digest import digest_at
from radixkv.tree.eviction_policies import EvictionPolicy
from radixkv.tree.forest import Forest
from radixkv.tree.node import Namespace
from radixkv.tree.spared import SparedLeaves


class EvictedRun(NamedTuple):
    """Consecutive pages that were evicted together."""

    namespace: Namespace
    digests: Sequence[int]
    """The chained digest of each page."""
    tokens: bytes
    """The run's tokens, little-endian int32."""
    pages: list[int]
    """Indices of the freed pages, in token order."""
    age: int | None = None
    """Uses of the tree since the last one of these pages; None if a waiting prompt needed them, or ages do not
    count."""


def evict_leaves(
    forest: Forest,
    policy: EvictionPolicy,
    n_pages: int,
    quotas: Mapping[str, int] | None,
    n_beyond: int,
    spared: SparedLeaves,
    n_required: int,
) -> Iterator[EvictedRun]:
    """Frees pages and yields them, as ``RadixTree.evict`` does."""
    left = None if quotas is None else dict(quotas)
    is_sparing = spared.is_sparing
    while n_pages > 0:
        leaves = forest.evictable.candidates(left)
        last_needed = None
        if is_sparing and (not leaves or leaves[0].n_retentions):
            last_needed = spared.last_needed(left)
        is_spared = last_needed is not None and not (leaves and last_needed.n_retentions)
        if is_spared:
            assert last_needed is not None
            leaf = last_needed
            is_required = spared.is_waited_for(leaf) or leaf.n_retentions
            n_most = n_required if is_required else n_pages
            if n_most <= 0:
                break
            n_most = min(n_most, len(leaf.pages) - spared.n_needed_earlier(leaf))
            spared.pop_last_needed()
        elif leaves and (n_required > 0 or not leaves[0].n_retentions):
            index = policy.victim(leaves)
            leaf = leaves[index]
            n_most = len(leaf.pages) - (spared.n_needed(leaf) if is_sparing else 0)
            if leaf.n_retentions:
                n_most = min(n_required, n_most)
        else:
            break
        group = forest.evictable.group_of(leaf)
        if left is not None:
            n_most = min(n_most, left[group])
        ends_leaf = n_most == len(leaf.pages) <= n_pages + n_beyond
        n_evicted = n_most if ends_leaf else min(n_pages, n_most)
        n_kept = len(leaf.pages) - n_evicted
        namespace, parent = leaf.namespace, leaf.parent
        assert parent is not None, "a root is no leaf to evict"
        digest_at(leaf, len(leaf.pages), forest.page_bytes)
        assert leaf.digests is not None
        digests = leaf.digests[n_kept:]
        if policy.remembers:
            policy.remember(leaf, digests, forest.n_leased + forest.n_evictable)
        if not (n_kept or is_spared):
            leaves.pop(index)
        age = None if is_spared else policy.age(leaf)
        tokens, pages = forest.truncate(leaf, n_kept)
        if is_sparing:
            if not n_kept:
                spared.spare(parent)
            elif is_spared:
                spared.spare_rest(leaf)
            else:
                spared.note_cut(leaf)
        n_pages -= n_evicted
        n_required -= n_evicted
        if left is not None:
            left[group] -= n_evicted
        yield EvictedRun(namespace, digests, tokens, pages, age)
