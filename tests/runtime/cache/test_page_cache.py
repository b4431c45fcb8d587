"""The page cache in isolation; other tests cover it together with the scheduler."""

from __future__ import annotations

import pytest

from radixkv.errors import InvariantError
from radixkv.runtime.cache.block_table import ComputedRow
from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.forest import Forest
from radixkv.tree.node import TOKEN_BYTES, Namespace


def full_cache(n_pages: int, n_leaves: int = 2) -> PageCache:
    """Returns a cache of one-token pages, all of them evictable, in leaves of equal length."""
    cache = PageCache(n_pages, 1)
    n_in_leaf = n_pages // n_leaves
    for first in range(0, n_pages, n_in_leaf):
        tokens = bytearray().join(
            token.to_bytes(TOKEN_BYTES, "little") for token in range(first, first + n_in_leaf)
        )
        blocks = cache.open(Namespace(), b"")
        assert cache.reserve(blocks, n_in_leaf)
        cache.commit(blocks, tokens, n_in_leaf, last_step=0)
        cache.mark_computed(blocks, n_in_leaf, step=0)
        cache.close(blocks)
    assert cache.n_free == 0
    return cache


@pytest.mark.parametrize(
    ("n_pages", "n_leaves", "n_at_a_time"), [(100, 2, 1), (1024, 2, 8), (1024, 32, 8), (1024, 64, 16)]
)
def test_a_large_pool_evicts_several_pages_at_a_time(n_pages: int, n_leaves: int, n_at_a_time: int) -> None:
    """At least 1/128 of the pages, and a leaf as a whole if at most as many are left of it."""
    cache = full_cache(n_pages, n_leaves)
    blocks = cache.open(Namespace(), b"")
    assert cache.reserve(blocks, 1)
    assert (cache.n_evicted, cache.n_free) == (n_at_a_time, n_at_a_time - 1)
    assert cache.reserve(blocks, n_pages), "every page is available"
    assert not cache.reserve(blocks, n_pages + 1)
    cache.check([blocks])


def test_append_pages_evicts_for_all_block_tables_or_changes_nothing() -> None:
    cache = full_cache(4)
    block_tables = [cache.open(Namespace(), b"") for _ in range(3)]
    assert cache.append_pages(block_tables)
    assert [len(blocks.pages) for blocks in block_tables] == [1, 1, 1]
    assert (cache.n_evicted, cache.n_available) == (3, 1)
    assert not cache.append_pages(block_tables)
    assert [len(blocks.pages) for blocks in block_tables] == [1, 1, 1]
    assert (cache.n_evicted, cache.n_available) == (3, 1)
    cache.check(block_tables)


def test_check_counts_finds_wrong_counts_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full_cache(2)
    cache.check_counts()
    monkeypatch.setattr(Forest, "add_lease", lambda self, node: setattr(node, "n_leases", node.n_leases + 1))
    blocks = cache.open(Namespace(), (0).to_bytes(TOKEN_BYTES, "little"))
    cache.close(blocks)
    with pytest.raises(InvariantError, match="-1 pages leased"):
        cache.check_counts()


def test_a_row_that_read_duplicates_computes_no_page_after_them() -> None:
    """The row of step 5 read the duplicates, which says nothing about the tree's pages that replaced them."""
    cache = PageCache(16, 1)
    tokens = bytearray().join(token.to_bytes(TOKEN_BYTES, "little") for token in range(3))
    first = cache.open(Namespace(), bytes(tokens))
    second = cache.open(Namespace(), bytes(tokens), reads=False)
    assert cache.reserve(first, 2)
    assert cache.reserve(second, 3)
    cache.commit(first, tokens, 2, last_step=1)
    cache.mark_computed(first, 2, step=1)
    cache.close(first)
    cache.commit(second, tokens, 2, last_step=5)
    cache.commit_computed([ComputedRow(second, tokens, 3, last_step=5)], step=5)
    assert cache.tree.n_computed(second.lease) == 2
    cache.check([second])
