"""The kernel that copies pages between the pool's layout, layer by layer, and one contiguous block a page."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.ops.cuda.programmatic_launch import warps_for

_MAX_BLOCK = 4096
"""Most elements of 8 bytes that a program copies at a time."""
_MAX_PROGRAMS = 128
"""Most programs of a launch, a quarter of an H200's multiprocessors. With 8, steps beside loads take 3 to 5% longer
(docs/decisions/log/0023-page-copies.md)."""


def gather_pages(k: Tensor, v: Tensor, pages: Tensor, out: Tensor, page_elements: int | None = None) -> None:
    """Copies pages out of the pool. One launch.

    Args:
        k, v: [layers, pool pages, n_elements] int64, contiguous.
        pages: [n] int32, indices of pool pages.
        out: int64, contiguous, with n blocks; each page's gets K of all layers, then V.
        page_elements: distance between two blocks; None: 2 * layers * n_elements, their size.
    """
    _copy(k, v, pages, out, page_elements, is_gather=True)


def scatter_pages(k: Tensor, v: Tensor, pages: Tensor, source: Tensor, page_elements: int | None = None) -> None:
    """Copies blocks into the pool: the inverse of ``gather_pages``. No page occurs twice. One launch."""
    _copy(k, v, pages, source, page_elements, is_gather=False)


def _copy(
    k: Tensor, v: Tensor, pages: Tensor, contiguous: Tensor, page_elements: int | None, *, is_gather: bool
) -> None:
    n_layers, _, n_elements = k.shape
    if page_elements is None:
        page_elements = 2 * n_layers * n_elements
    # A power of two that divides all places, so that nothing is masked.
    block = min(_MAX_BLOCK, n_elements & -n_elements, page_elements & -page_elements)
    n_blocks = len(pages) * 2 * n_layers * n_elements // block
    _copy_pages[(min(n_blocks, _MAX_PROGRAMS),)](
        k,
        v,
        pages,
        contiguous,
        n_blocks,
        k.stride(0),
        page_elements,
        N_LAYERS=n_layers,
        N_ELEMENTS=n_elements,
        IS_GATHER=is_gather,
        BLOCK=block,
        num_warps=warps_for(block),
    )


@triton.jit(do_not_specialize=["n_blocks"], do_not_specialize_on_alignment=["pages"])
def _copy_pages(
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    contiguous: tl.tensor,
    n_blocks: tl.tensor,
    layer_stride: tl.tensor,
    page_elements: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_ELEMENTS: tl.constexpr,
    IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        first = block * BLOCK
        part = first // N_ELEMENTS
        index = part // (2 * N_LAYERS)
        page = tl.load(pages + index).to(tl.int64)
        layer = (part % N_LAYERS).to(tl.int64)
        is_k = part % (2 * N_LAYERS) < N_LAYERS
        # Triton sees only with this hint that 16 bytes can be copied at a time.
        offset = tl.multiple_of(layer * layer_stride + page * N_ELEMENTS + first % N_ELEMENTS, BLOCK)
        in_pool = tl.where(is_k, k, v) + (offset + tl.arange(0, BLOCK))
        place = index.to(tl.int64) * page_elements + first % (2 * N_LAYERS * N_ELEMENTS)
        in_block = contiguous + (tl.multiple_of(place, BLOCK) + tl.arange(0, BLOCK))
        if IS_GATHER:
            tl.store(in_block, tl.load(in_pool))
        else:
            tl.store(in_pool, tl.load(in_block))
