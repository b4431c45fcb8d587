"""Eviction in the order of ticks that the caller supplies."""

from __future__ import annotations

from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree

NAMESPACE = Namespace()


@given(st.permutations(range(8)))
def test_the_smallest_tick_is_evicted_first(ticks):
    now = 0
    tree = RadixTree(1, next_tick=lambda: now)
    for page, tick in enumerate(ticks):
        now = tick
        lease = tree.lease(NAMESPACE, b"")
        tree.commit(lease, pack("<i", page), [page])
        tree.mark_computed(lease, 1)
        tree.release(lease)
        now = 8  # for the root, which no child may exceed
        tree.release(tree.lease(NAMESPACE, b""))
        tree.check()
    evicted = [page for _ in ticks for run in tree.evict(1) for page in run.pages]
    assert [ticks[page] for page in evicted] == sorted(ticks)


def test_the_page_cache_evicts_by_its_ticks():
    now = 5
    cache = PageCache(2, 1, next_tick=lambda: now)
    for token in (1, 2):
        blocks = cache.open(NAMESPACE, pack("<i", token))
        assert cache.reserve(blocks, 1)
        cache.commit(blocks, bytearray(pack("<i", token)), 1, last_step=-1)
        cache.mark_computed(blocks, 1, step=0)
        cache.close(blocks)
        now = 3
    blocks = cache.open(NAMESPACE, pack("<i", 3))
    assert cache.reserve(blocks, 1)
    assert cache.matches([(NAMESPACE, pack("<i", token)) for token in (1, 2)]) == [1, 0]
