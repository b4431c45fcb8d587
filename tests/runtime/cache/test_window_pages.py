"""Window pages: slabs that are divided, how much memory they save, and tails that share them."""

from __future__ import annotations

import pytest
import torch

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import Slabs
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.device.memory.slab_shape import SlabShape, slab_shape
from radixkv.runtime.request import Phase
from radixkv.tree.node import Namespace
from support.engine import Engine

PAGE_SIZE = 16
GEMMA_3_4B = PageShape(n_layers=34, n_kv_heads=4, page_size=PAGE_SIZE, head_dim=256, dtype=torch.bfloat16)
GEMMA_WINDOWS = tuple(None if (layer + 1) % 6 == 0 else 1024 for layer in range(34))
GPT_OSS_20B = PageShape(n_layers=24, n_kv_heads=8, page_size=PAGE_SIZE, head_dim=64, dtype=torch.bfloat16)
GPT_OSS_WINDOWS = (128, None) * 12


def shape_of(page: PageShape, windows: tuple[int | None, ...], n_pages: int, max_model_len: int) -> SlabShape:
    shape = slab_shape(page, windows, n_pages, max_row_tokens=2048, max_model_len=max_model_len)
    assert shape is not None
    n_units = (shape.n_slabs + shape.n_window_slabs + 1) * shape.units_per_slab
    assert n_units * page.n_bytes // page.n_layers <= (n_pages + 1) * page.n_bytes, "it takes more memory"
    return shape


def n_rows(shape: SlabShape, n_tokens: int) -> int:
    """Returns how many rows of ``n_tokens`` computed tokens, in chunks of 2,048, the pool holds at once."""
    windows = WindowPages.of(shape.pool, PAGE_SIZE)
    cache = PageCache(shape.n_pages, PAGE_SIZE, n_states=100_000, window_pages=windows)
    tables = []
    while True:
        blocks = cache.open(Namespace(), b"")
        tables.append(blocks)
        for end in (*range(2048, n_tokens, 2048), n_tokens):
            if not cache.reserve(blocks, -(-end // PAGE_SIZE)):
                cache.check(tables)
                for one in tables:
                    cache.close(one)
                assert cache.n_free == shape.n_pages
                return len(tables) - 1
            cache.free_behind(blocks, end)


def test_gemma_3_4b_holds_at_least_five_times_the_rows_of_32k() -> None:
    n_pages = (40 << 30) // GEMMA_3_4B.n_bytes
    shape = shape_of(GEMMA_3_4B, GEMMA_WINDOWS, n_pages, 131_072)
    assert (shape.pages_per_slab, shape.units_per_slab) == (6, 30)
    before = n_pages * PAGE_SIZE // 32_768
    assert n_rows(shape, 32_768) >= 5 * before == 45


def test_short_rows_take_as_much_memory_as_before_but_for_the_units_that_a_slab_leaves_unused() -> None:
    n_pages = (40 << 30) // GEMMA_3_4B.n_bytes
    shape = shape_of(GEMMA_3_4B, GEMMA_WINDOWS, n_pages, 131_072)
    assert n_rows(shape, 512) >= 34 / 35 * 0.99 * (n_pages * PAGE_SIZE // 512)


def test_gpt_oss_holds_nearly_twice_the_rows() -> None:
    n_pages = (40 << 30) // GPT_OSS_20B.n_bytes
    shape = shape_of(GPT_OSS_20B, GPT_OSS_WINDOWS, n_pages, 131_072)
    assert shape.units_per_slab == 12
    assert n_rows(shape, 32_768) >= 1.9 * (n_pages * PAGE_SIZE // 32_768)


@pytest.mark.parametrize(
    ("n_pages", "max_model_len", "is_shape"),
    [(150, 131_072, False), (200, 131_072, False), (200, 3000, True), (400, 131_072, True)],
)
def test_a_pool_that_would_hold_fewer_tokens_has_no_slabs(n_pages: int, max_model_len: int, is_shape: bool) -> None:
    """The windows of one request and a row take 193 slabs, the memory of 170 pages of all layers."""
    shape = slab_shape(GEMMA_3_4B, GEMMA_WINDOWS, n_pages, max_row_tokens=2048, max_model_len=max_model_len)
    assert (shape is not None) == is_shape
    if shape is not None:
        assert shape.n_pages >= min(n_pages, -(-max_model_len // PAGE_SIZE))


def test_pages_are_taken_from_divided_slabs_and_windows_from_whole_ones() -> None:
    slabs = Slabs(3, 4, 1)
    first = slabs.take(2)
    windows = [slabs.take_window() for _ in range(3)]
    assert windows == [4, 1, 2], "slabs for windows only come first"
    assert (len(slabs), slabs.n_free_windows) == (4, 1)
    more = slabs.take(2)
    assert {page // 3 for page in first + more[:1]} == {0}
    slabs.give_window_back(2)
    slabs += more[1:]
    slabs += first
    assert (len(slabs), slabs.n_free_windows) == (8, 2)
    assert slabs.n_shared == 1
    assert sorted(slabs) == sorted({*range(12)} - {*slabs.pages_of(1)} - set(more[:1]))


def n_tail_pages(one: Engine) -> int:
    """Returns how many window pages tails hold."""
    return len({page for state in one.cache.tree.states or () for page in state.pages})


def test_tails_of_one_window_share_their_pages() -> None:
    one = Engine(200, 4, mixed_window=16, pages_per_slab=2, max_num_batched_tokens=64)
    prompt = list(range(50, 90))
    one.serve(prompt, 1)
    n_before = n_tail_pages(one)
    one.serve([*prompt, 200, 201, 202, 203, 204], 1)
    states = sorted(one.cache.tree.states or (), key=lambda state: state.n_tokens)
    assert [state.n_tokens for state in states] == [36, 40, 44]
    assert n_tail_pages(one) <= n_before + 2
    assert len(set(states[0].pages) & set(states[1].pages)) == 3


def test_requests_that_need_the_whole_pool_one_after_another() -> None:
    """The windows of one are in the place of pages that the other needs."""
    one = Engine(24, 4, mixed_window=8, pages_per_slab=2, max_num_batched_tokens=8, max_num_seqs=2)
    first = one.add(list(range(10, 40)), 60)
    second = one.add(list(range(50, 70)), 74)
    one.run_to_the_end("length")
    assert first.phase is second.phase is Phase.FINISHED
    assert one.scheduler.n_preemptions > 0
