"""The kernel that gathers and scatters pages, against torch's indexing."""

from __future__ import annotations

import pytest
import torch
from kernel_support import integers, normal, on_kernels, poisoned

from radixkv.runtime.device.ops.cuda.page_copies import gather_pages, scatter_pages

pytestmark = on_kernels

POOLS = [(1, 5, 1, 1, 64), (2, 9, 16, 2, 64), (3, 40, 16, 3, 128), (5, 7, 64, 8, 128)]
"""[layers, pages, page_size, kv_heads, head_dim]."""


@pytest.mark.parametrize("shape", POOLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather_and_scatter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    k, v = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    pages = torch.randperm(shape[1])[: max(1, shape[1] * 2 // 3)].tolist()
    expected = torch.stack([torch.stack([k[:, page], v[:, page]]) for page in pages])
    n_elements = expected.nbytes // 8
    out = poisoned(n_elements + 64, dtype=torch.int64)
    words = [cache.view(torch.int64).flatten(2) for cache in (k, v)]
    gather_pages(*words, integers(pages), out)
    assert torch.equal(out[:n_elements], expected.view(torch.int64).flatten())
    assert bool((out[n_elements:] == -77).all()), "what lies behind the pages was overwritten"

    others = torch.randperm(shape[1])[: len(pages)].tolist()
    expected_k, expected_v = k.clone(), v.clone()
    expected_k[:, others], expected_v[:, others] = expected[:, 0].transpose(0, 1), expected[:, 1].transpose(0, 1)
    scatter_pages(*words, integers(others), out)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)


def test_pages_in_parts() -> None:
    """Each part has a place in a page's block, which only it writes."""
    shapes, n_pages = ((3, 8, 16, 3, 64), (2, 8, 16, 1, 512)), 5
    pools = [[normal(*shape, dtype=torch.bfloat16) for _ in range(2)] for shape in shapes]
    pages = torch.randperm(8)[:n_pages].tolist()
    parts = [torch.stack([torch.stack([k[:, page], v[:, page]]) for page in pages]).flatten(1) for k, v in pools]
    expected = torch.cat(parts, 1).contiguous()
    page_elements = expected[0].nbytes // 8
    out = poisoned(n_pages * page_elements, dtype=torch.int64)
    words = [[cache.view(torch.int64).flatten(2) for cache in pool] for pool in pools]
    firsts = [0, parts[0][0].nbytes // 8]
    for (k, v), first in zip(words, firsts, strict=True):
        gather_pages(k, v, integers(pages), out[first:], page_elements)
    assert torch.equal(out, expected.view(torch.int64).flatten())

    others = torch.randperm(8)[:n_pages].tolist()
    wanted = [[cache.clone() for cache in pool] for pool in pools]
    for pool in wanted:
        for cache, source in zip(pool, [cache.clone() for cache in pool], strict=True):
            cache[:, others] = source[:, pages]
    for (k, v), first in zip(words, firsts, strict=True):
        scatter_pages(k, v, integers(others), out[first:], page_elements)
    for pool, values in zip(pools, wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(pool, values, strict=True))
