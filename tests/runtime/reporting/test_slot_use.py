"""The count of used slots on small examples; the engine's property tests compare it with lists of all slots."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.reporting.slot_use import SlotUse, TableUse, count_slot_use
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 4


def _store(cache: PageCache, tokens: list[int], salt: str = "") -> TableUse:
    packed = bytearray(pack_tokens(tokens))
    blocks = cache.open(Namespace(salt=salt), bytes(packed))
    assert cache.reserve(blocks, cache.pages_for(len(tokens)))
    cache.commit(blocks, packed, len(tokens), 0)
    return TableUse(blocks, packed, len(tokens))


def test_a_page_counts_once_and_a_last_page_is_partly_empty() -> None:
    cache = PageCache(16, PAGE_SIZE)
    first = _store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert count_slot_use([first], PAGE_SIZE) == SlotUse(n_slots=12, n_filled=10, n_duplicate=0, n_saved=0)
    second = _store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 20])
    assert count_slot_use([first, second], PAGE_SIZE) == SlotUse(n_slots=16, n_filled=11, n_duplicate=0, n_saved=8)


def test_equal_beginnings_of_pages_after_one_path_are_duplicates() -> None:
    cache = PageCache(16, PAGE_SIZE)
    tables = [
        _store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        _store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 20]),  # 9 is in both tails
        _store(cache, [1, 2, 3, 4, 5, 6, 70, 80]),  # 5 and 6 are in another page of the tree, too
        _store(cache, [1, 2, 3, 4, 5]),  # 5 is in a tail and in both pages
        _store(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], salt="other"),
        _store(cache, [2, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # the same tokens after another one
    ]
    assert count_slot_use(tables, PAGE_SIZE).n_duplicate == 1 + 2 + 1


def test_what_no_table_leases_any_more_is_no_duplicate() -> None:
    cache = PageCache(16, PAGE_SIZE)
    first = _store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    second = _store(cache, [1, 2, 3, 4, 5, 6, 70, 80])
    cache.mark_computed(first.blocks, 8, 0)
    cache.close(first.blocks)
    assert cache.n_free == 16 - 3, "the page of the first is still cached"
    assert count_slot_use([second], PAGE_SIZE) == SlotUse(n_slots=8, n_filled=8, n_duplicate=0, n_saved=0)


def test_a_replaced_page_is_a_duplicate_until_it_is_freed() -> None:
    cache = PageCache(16, PAGE_SIZE)
    tokens = bytearray(pack_tokens([1, 2, 3, 4]))
    both = [cache.open(Namespace(), b"") for _ in range(2)]
    for blocks in both:
        cache.reserve(blocks, 1)
    tables = [TableUse(blocks, tokens, 4) for blocks in both]
    assert count_slot_use(tables, PAGE_SIZE) == SlotUse(n_slots=8, n_filled=8, n_duplicate=4, n_saved=0)
    for blocks in both:
        cache.commit(blocks, tokens, 4, 3)
    assert count_slot_use(tables, PAGE_SIZE) == SlotUse(n_slots=8, n_filled=8, n_duplicate=4, n_saved=4)
    for blocks in both:
        cache.free_replaced(blocks, 3)
    assert count_slot_use(tables, PAGE_SIZE) == SlotUse(n_slots=4, n_filled=4, n_duplicate=0, n_saved=4)


def test_tables_without_a_tree_fill_their_own_pages() -> None:
    cache = PageCache(16, PAGE_SIZE, is_sharing=False)
    tables = [_store(cache, [1, 2, 3, 4, 5]) for _ in range(2)]
    assert count_slot_use(tables, PAGE_SIZE) == SlotUse(n_slots=16, n_filled=10, n_duplicate=0, n_saved=0)
