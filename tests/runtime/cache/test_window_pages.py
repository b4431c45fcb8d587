"""Window pages: slabs that are divided, how much memory they save, and tails that share them."""

from __future__ import annotations

import pytest
import torch

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import Slabs
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape
from radixkv.runtime.device.memory.slab_shape import SlabShape, slab_shape
from radixkv.runtime.request import Phase
from radixkv.tree.node import Namespace
from support.engine import Engine

PAGE_SIZE = 16
Model = tuple[PageLayout, tuple[int | None, ...]]
"""A page of all layers, and their windows."""


def of_equal_layers(windows: tuple[int | None, ...], n_kv_heads: int, head_dim: int) -> Model:
    shape = PageShape(len(windows), n_kv_heads, PAGE_SIZE, head_dim, torch.bfloat16)
    return PageLayout.uniform(shape), windows


def of_two_shapes(
    is_window: list[bool], window: int, with_window: tuple[int, int], without: tuple[int, int], n_shared: int = 0
) -> Model:
    """Returns a model whose layers with windows have other heads than those without.

    Args:
        is_window: of each layer.
        window: of those that have one.
        with_window: KV heads and head size of layers with windows.
        without: the same of the others.
        n_shared: last layers that read the K and V of the last layer of their kind before them.
    """
    own = is_window[: len(is_window) - n_shared]
    parts = [
        PageShape(own.count(kind), *heads, dtype=torch.bfloat16)
        for kind, heads in (
            (True, (with_window[0], PAGE_SIZE, with_window[1])),
            (False, (without[0], PAGE_SIZE, without[1])),
        )
    ]
    places = [LayerPlace(0 if kind else 1, own[:layer].count(kind)) for layer, kind in enumerate(own)]
    places += [LayerPlace(0 if kind else 1, own.count(kind) - 1) for kind in is_window[len(own) :]]
    return PageLayout(tuple(parts), tuple(places)), tuple(window if kind else None for kind in is_window)


GEMMA_3_4B = of_equal_layers(tuple(None if (layer + 1) % 6 == 0 else 1024 for layer in range(34)), 4, 256)
GPT_OSS_20B = of_equal_layers((128, None) * 12, 8, 64)
GEMMA_4_E4B = of_two_shapes(([True] * 5 + [False]) * 7, 512, (2, 256), (2, 512), n_shared=18)
GEMMA_4_26B = of_two_shapes(([True] * 5 + [False]) * 5, 1024, (8, 256), (2, 512))
GEMMA_4_31B = of_two_shapes(([True] * 5 + [False]) * 10, 1024, (16, 256), (4, 512))


def pool_pages(model: Model, n_bytes: int = 40 << 30) -> int:
    """Returns how many pages of all layers a pool has."""
    return n_bytes // model[0].n_bytes


def shape_of(model: Model, n_pages: int, max_model_len: int = 131_072) -> SlabShape:
    page, windows = model
    shape = slab_shape(page, windows, n_pages, max_row_tokens=2048, max_model_len=max_model_len)
    assert shape is not None
    assert shape.n_bytes <= (n_pages + 1) * page.n_bytes, "it takes more memory"
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
    n_pages = pool_pages(GEMMA_3_4B)
    shape = shape_of(GEMMA_3_4B, n_pages)
    assert (shape.pages_per_slab, shape.slab_values) == (6, 30 * PAGE_SIZE * 1024)
    before = n_pages * PAGE_SIZE // 32_768
    assert n_rows(shape, 32_768) >= 5 * before == 45


def test_short_rows_take_as_much_memory_as_before_but_for_what_a_slab_leaves_unused() -> None:
    n_pages = pool_pages(GEMMA_3_4B)
    shape = shape_of(GEMMA_3_4B, n_pages)
    assert n_rows(shape, 512) >= 34 / 35 * 0.99 * (n_pages * PAGE_SIZE // 512)


def test_gpt_oss_holds_nearly_twice_the_rows() -> None:
    n_pages = pool_pages(GPT_OSS_20B)
    shape = shape_of(GPT_OSS_20B, n_pages)
    assert shape.slab_values == 12 * PAGE_SIZE * 512
    assert n_rows(shape, 32_768) >= 1.9 * (n_pages * PAGE_SIZE // 32_768)


@pytest.mark.parametrize(
    ("model", "k", "unused", "gain"),
    [(GEMMA_4_E4B, 3, 2048, 3.0), (GEMMA_4_26B, 10, 0, 7.0), (GEMMA_4_31B, 10, 0, 7.0)],
    ids=["E4B", "26B", "31B"],
)
def test_gemma_4_holds_several_times_the_rows_of_32k(model: Model, k: int, unused: int, gain: float) -> None:
    n_pages = pool_pages(model)
    shape = shape_of(model, n_pages)
    assert shape.pages_per_slab == k
    assert shape.slab_values - shape.window_page_values == unused * PAGE_SIZE
    assert n_rows(shape, 32_768) >= gain * (n_pages * PAGE_SIZE / 32_768)


@pytest.mark.parametrize(
    "model",
    [
        GEMMA_3_4B,
        GPT_OSS_20B,
        GEMMA_4_E4B,
        GEMMA_4_26B,
        pytest.param(GEMMA_4_31B, marks=pytest.mark.nightly),
        of_two_shapes([True, False, False, False], 64, (4, 64), (2, 48)),
        of_two_shapes([False, True, True], 64, (3, 40), (1, 24)),
        of_two_shapes([True, False, True, False, False], 64, (2, 16), (1, 24), n_shared=1),
    ],
)
def test_no_two_layers_have_the_same_memory(model: Model) -> None:
    """All pages of one kind, with those of slabs that are window pages, take each value at most once."""
    page, windows = model
    shape = SlabShape(page, windows, 3, 2)
    values = torch.arange(shape.n_values)
    pages: dict[bool, dict[LayerPlace, torch.Tensor]] = {True: {}, False: {}}
    for layer, place, window in zip(shape.layers(), page.places, windows, strict=True):
        sizes = PAGE_SIZE, layer.shape.n_kv_heads, layer.shape.head_dim
        view = layer.view(values, sizes)
        assert view[0].is_contiguous()
        assert view.stride(0) == shape.pitch(has_window=window is not None) * view.stride(1)
        assert torch.equal(pages[window is not None].setdefault(place, view), view), "they share K and V"
    for slab in range(shape.n_slabs_in_memory):
        per_slab = shape.pages_per_slab
        of_pages = [one[slab * per_slab : (slab + 1) * per_slab] for one in pages[False].values()]
        of_windows = [one[slab] for one in pages[True].values()]
        for views in (of_pages, of_windows):
            taken = torch.cat([one.flatten() for one in views])
            assert len(taken.unique()) == len(taken)
            assert slab * shape.slab_values <= int(taken.min())
            assert int(taken.max()) < (slab + 1) * shape.slab_values


@pytest.mark.parametrize(
    ("n_pages", "max_model_len", "is_shape"),
    [(150, 131_072, False), (200, 131_072, False), (200, 3000, True), (400, 131_072, True), (400, 1040, False)],
)
def test_a_pool_that_would_hold_fewer_tokens_has_no_slabs(n_pages: int, max_model_len: int, is_shape: bool) -> None:
    """The windows of one request and a row take 193 slabs, the memory of 170 pages of all layers.

    Sequences that are hardly longer than the window take more memory than before.
    """
    shape = slab_shape(*GEMMA_3_4B, n_pages, max_row_tokens=2048, max_model_len=max_model_len)
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


@pytest.mark.parametrize("window", [5, 6, 7, 8])
@pytest.mark.parametrize("n_answer", range(5, 9))
def test_the_next_turn_goes_on_from_the_last_page_of_an_answer_of_any_length(window: int, n_answer: int) -> None:
    """Also where the window is no multiple of a page, and wherever in a page the answer ends."""
    engine = Engine(60, 4, mixed_window=window)
    prompt = [*range(10, 29), 3, 4]
    request = engine.serve(prompt, n_answer)
    turn = [*prompt, *engine.output(request), 50, 51, 52, 53, 54]
    n_computed = len(prompt) + n_answer - 1  # the last token of an answer is not computed
    assert engine.n_cached(turn) == n_computed - n_computed % 4
    engine.serve(turn, 2)
    engine.run_to_the_end()
