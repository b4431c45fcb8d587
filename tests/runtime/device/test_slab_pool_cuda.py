"""CUDA's pool of slabs, on the CPU: where layers have their pages, and copies of both kinds of pages."""

from __future__ import annotations

import pytest
import torch

from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.device.memory.slab_shape import SlabShape, empty_slabs

WINDOWS = {
    "five of six": (*[64] * 5, None, 64),
    "every other": (64, None) * 2,
    "few": (None, 64, None, None, 64),
}
N_SLABS, N_WINDOW_SLABS = 6, 3


def pool_of(windows: tuple[int | None, ...], dtype: torch.dtype) -> CudaSlabPool:
    shape = SlabShape(PageShape(len(windows), 2, 4, 16, dtype), windows, N_SLABS, N_WINDOW_SLABS)
    pool = CudaSlabPool(shape, torch.device("cpu"))
    for cache in (pool.k, pool.v):
        cache.view(torch.uint8).random_()
    return pool


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_slot_is_a_place_in_the_memory_of_a_layer(windows: tuple[int | None, ...]) -> None:
    """Kernels store K and V at ``page * pitch + offset`` tokens after the beginning of a layer."""
    pool = pool_of(windows, torch.bfloat16)
    for window, layer in zip(windows, pool.layers, strict=True):
        pitch = pool.page_pitch if window is None else pool.window_pitch
        for cache, whole in zip(layer, (pool.k, pool.v), strict=True):
            cache, tokens = cache.view(torch.int16), whole.view(torch.int16).view(-1, 2, 16)
            first = cache.storage_offset() // tokens[0].numel()
            pages, offsets = torch.meshgrid(torch.arange(len(cache)), torch.arange(4), indexing="ij")
            assert torch.equal(tokens[first + pages * pitch + offsets], cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_pages_are_copied_in_all_layers_of_their_kind(windows: tuple[int | None, ...], dtype: torch.dtype) -> None:
    pool = pool_of(windows, dtype)
    last = [cache.view(torch.uint8)[-1].clone() for cache in (pool.k, pool.v)]
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
        assert torch.equal(cache.view(torch.uint8)[-1], values)


def test_a_pool_without_slabs_has_the_pages_that_padding_reads() -> None:
    shape = empty_slabs(PageShape(4, 2, 4, 16, torch.bfloat16), WINDOWS["every other"])
    pool = CudaSlabPool(shape, torch.device("cpu"))
    assert (pool.n_pages, pool.zero_page, pool.zero_window_page) == (0, 0, 0)
    pool.copy([(0, 0)])
    pool.copy_windows([(0, 0)] * 17)
    assert all(len(cache) == 1 for layer in pool.layers for cache in layer)
