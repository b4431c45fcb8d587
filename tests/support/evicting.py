"""Eviction of all that page caches have."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.node import Namespace


def evict_all(*caches: PageCache) -> None:
    """Evicts everything from caches of which no page is in use."""
    for cache in caches:
        blocks = cache.open(Namespace(), b"", bypasses_tree=True)
        assert cache.reserve(blocks, cache.n_pages)
        cache.close(blocks)
