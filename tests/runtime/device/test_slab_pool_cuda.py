"""CUDA's pool of slabs, on the CPU: where layers have their pages, and copies of both kinds of pages."""

from __future__ import annotations

import pytest
import torch

from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape
from radixkv.runtime.device.memory.slab_shape import SlabShape, empty_slabs

WINDOWS = {
    "five of six": (*[64] * 5, None, 64),
    "every other": (64, None) * 2,
    "few": (None, 64, None, None, 64),
}
N_SLABS, N_WINDOW_SLABS = 6, 3


def layout_of(windows: tuple[int | None, ...], dtype: torch.dtype, *, has_two_shapes: bool) -> PageLayout:
    """Returns the layout of layers that are all equal, or of which those with windows have other heads."""
    if not has_two_shapes:
        return PageLayout.uniform(PageShape(len(windows), 2, 4, 16, dtype))
    n_full = windows.count(None)
    parts = PageShape(n_full, 1, 4, 48, dtype), PageShape(len(windows) - n_full, 2, 4, 16, dtype)
    counts, places = [0, 0], []
    for window in windows:
        part = int(window is not None)
        places.append(LayerPlace(part, counts[part]))
        counts[part] += 1
    return PageLayout(parts, tuple(places))


def pool_of(windows: tuple[int | None, ...], dtype: torch.dtype, *, has_two_shapes: bool) -> CudaSlabPool:
    page = layout_of(windows, dtype, has_two_shapes=has_two_shapes)
    pool = CudaSlabPool(SlabShape(page, windows, N_SLABS, N_WINDOW_SLABS), torch.device("cpu"))
    for cache in (pool.k, pool.v):
        cache.view(torch.uint8).random_()
    return pool


@pytest.mark.parametrize("has_two_shapes", [False, True])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_slot_is_a_place_in_the_memory_of_a_layer(windows: tuple[int | None, ...], has_two_shapes: bool) -> None:
    """Kernels store K and V at ``page * pitch + offset`` tokens after the beginning of a layer."""
    pool = pool_of(windows, torch.bfloat16, has_two_shapes=has_two_shapes)
    for window, layer in zip(windows, pool.layers, strict=True):
        pitch = pool.page_pitch if window is None else pool.window_pitch
        for cache, whole in zip(layer, (pool.k, pool.v), strict=True):
            cache, values = cache.view(torch.int16), whole.view(torch.int16)
            pages, offsets = torch.meshgrid(torch.arange(len(cache)), torch.arange(4), indexing="ij")
            n = cache[0, 0].numel()
            first = cache.storage_offset() + (pages * pitch + offsets) * n
            assert torch.equal(values[first[..., None] + torch.arange(n)], cache.flatten(2))


@pytest.mark.parametrize("has_two_shapes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_pages_are_copied_in_all_layers_of_their_kind(
    windows: tuple[int | None, ...], dtype: torch.dtype, has_two_shapes: bool
) -> None:
    pool = pool_of(windows, dtype, has_two_shapes=has_two_shapes)
    n_last = len(pool.k) // (N_SLABS + N_WINDOW_SLABS + 1) * dtype.itemsize
    last = [cache.view(torch.uint8)[-n_last:].clone() for cache in (pool.k, pool.v)]
    for is_window, pairs, copy in (
        (False, [(0, 4), (3, pool.n_pages - 1), (2, 1)], pool.copy),
        (True, [(1, 3), (8, 0), (1, 5)], pool.copy_windows),
    ):
        before = [[cache.view(torch.uint8).clone() for cache in layer] for layer in pool.layers]
        copy(pairs)
        for window, layer, old in zip(windows, pool.layers, before, strict=True):
            for cache, expected in zip(layer, old, strict=True):
                if (window is not None) == is_window:
                    for source, destination in pairs:
                        assert torch.equal(cache.view(torch.uint8)[destination], expected[source])
    for cache, values in zip((pool.k, pool.v), last, strict=True):
        assert torch.equal(cache.view(torch.uint8)[-n_last:], values)


def test_a_pool_without_slabs_has_the_pages_that_padding_reads() -> None:
    windows = WINDOWS["every other"]
    shape = empty_slabs(layout_of(windows, torch.bfloat16, has_two_shapes=False), windows)
    pool = CudaSlabPool(shape, torch.device("cpu"))
    assert (pool.n_pages, pool.zero_page, pool.zero_window_page) == (0, 0, 0)
    pool.copy([(0, 0)])
    pool.copy_windows([(0, 0)] * 17)
    assert all(len(cache) == 1 for layer in pool.layers for cache in layer)
