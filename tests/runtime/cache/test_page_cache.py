"""The page cache by itself; what it does for requests is tested where they run."""

from __future__ import annotations

import pytest

from radixkv.errors import InvariantError
from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.node import TOKEN_BYTES, Namespace


def full_of_cached_pages(n_pages: int) -> PageCache:
    """Pages of one token, all evictable, in two leaves."""
    cache = PageCache(n_pages, 1)
    for first in (0, n_pages // 2):
        tokens = bytearray().join(
            token.to_bytes(TOKEN_BYTES, "little") for token in range(first, first + n_pages // 2)
        )
        blocks = cache.open(Namespace(), b"")
        assert cache.reserve(blocks, n_pages // 2)
        cache.commit(blocks, tokens, n_pages // 2, last_read=0)
        cache.mark_computed(blocks, n_pages // 2, step=0)
        cache.close(blocks)
    assert cache.n_free == 0
    return cache


@pytest.mark.parametrize(("n_pages", "n_together"), [(100, 1), (1024, 4)])
def test_pages_of_a_large_pool_are_evicted_together(n_pages: int, n_together: int) -> None:
    cache = full_of_cached_pages(n_pages)
    blocks = cache.open(Namespace(), b"")
    assert cache.reserve(blocks, 1)
    assert (cache.n_evicted, cache.n_free) == (n_together, n_together - 1)
    assert cache.reserve(blocks, n_pages), "all of them are to be had"
    assert not cache.reserve(blocks, n_pages + 1)
    cache.check([blocks])


def test_tables_get_a_page_each_that_is_evicted_for_them_or_none_does() -> None:
    cache = full_of_cached_pages(4)
    block_tables = [cache.open(Namespace(), b"") for _ in range(3)]
    assert cache.append_pages(block_tables)
    assert [len(blocks.pages) for blocks in block_tables] == [1, 1, 1]
    assert (cache.n_evicted, cache.n_available) == (3, 1)
    assert not cache.append_pages(block_tables)
    assert [len(blocks.pages) for blocks in block_tables] == [1, 1, 1]
    assert (cache.n_evicted, cache.n_available) == (3, 1)
    cache.check(block_tables)


def test_counts_that_are_off_but_add_up_are_found_after_each_step() -> None:
    cache = PageCache(8, 1)
    cache.check_counts()
    cache.tree._forest.n_leased -= 1
    cache.tree._forest.n_evictable += 1
    with pytest.raises(InvariantError, match="-1 pages leased"):
        cache.check_counts()
