"""Pages are copied in chunks with a bounded amount of temporary memory."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_support import DEVICE

from radixkv.runtime.device.memory.cuda.kv_pool import COPIED_AT_ONCE_BYTES, CudaPool
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_large_pages_are_copied_correctly_in_chunks(dtype: torch.dtype) -> None:
    page = PageLayout.uniform(PageShape(16, 64, 8, 128, dtype))
    n_pages = 2 * COPIED_AT_ONCE_BYTES // (page.n_bytes // 2) + 7
    pool = CudaPool(page, 2 * n_pages, torch.device(DEVICE))
    caches = [cache.view(torch.uint8) for cache in (pool.k, pool.v)]
    for cache in caches:
        cache.random_()
    pages = random.Random(0).sample(range(2 * n_pages), 2 * n_pages)
    pairs = list(zip(pages[:n_pages], pages[n_pages:], strict=True))
    sources, destinations = torch.tensor(pairs, device=DEVICE).t()
    expected = [cache.index_copy(1, destinations, cache[:, sources]) for cache in caches]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    in_use = torch.cuda.memory_allocated()
    pool.copy(pairs)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - in_use <= COPIED_AT_ONCE_BYTES + (1 << 20)
    assert all(torch.equal(cache, values) for cache, values in zip(caches, expected, strict=True))
