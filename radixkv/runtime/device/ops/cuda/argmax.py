"""The argmax kernels: the id of each row's largest logit, and whether all its logits are finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two

_BLOCK = 4096
"""Logits that a program reads at a time."""
FEW_ROWS = 32
"""Up to this many rows, each program reads one block of logits, for the most programs; for more rows, four."""


def argmax_scratch(n_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Allocates the scratch memory of ``argmax`` for up to ``n_rows`` rows."""
    return torch.empty(n_rows, triton.cdiv(vocab_size, _BLOCK), dtype=torch.int64, device=device)


def argmax(
    logits: Tensor,
    ids_out: Tensor,
    finite_out: Tensor,
    scratch: Tensor,
    *,
    batch_slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
) -> None:
    """Finds each row's largest logit, the smallest id among equal ones. Two launches.

    Args:
        logits: [rows, vocab], any float dtype; rows may be strided.
        ids_out: [rows] int32; 0 for a row with a logit that is not finite.
        finite_out: [rows] int32, 1 where all logits are finite, else 0.
        scratch: from ``argmax_scratch``.
        batch_slots: [rows] int32; required with ``last_tokens``.
        last_tokens: [batch slots] int32; if given, also stores ``last_tokens[batch_slots] = ids_out``.
    """
    n_rows, size = logits.shape
    n_blocks = 1 if n_rows <= FEW_ROWS else 4
    n_parts = triton.cdiv(size, n_blocks * _BLOCK)
    options = overlapping(logits)
    _best_of_parts[n_rows, n_parts](
        logits,
        scratch,
        logits.stride(0),
        scratch.stride(0),
        size,
        BLOCK=_BLOCK,
        N_BLOCKS=n_blocks,
        num_warps=8,
        **options,
    )
    _best_of_rows[(n_rows,)](
        scratch,
        ids_out,
        finite_out,
        ids_out if batch_slots is None else batch_slots,
        ids_out if last_tokens is None else last_tokens,
        scratch.stride(0),
        STORES_LAST_TOKENS=last_tokens is not None,
        N_PARTS=n_parts,
        BLOCK=power_of_two(n_parts),
        num_warps=1,
        **options,
    )


@triton.jit(do_not_specialize_on_alignment=["scratch"])
def _best_of_parts(
    logits: tl.tensor,
    scratch: tl.tensor,
    logits_stride: tl.tensor,
    scratch_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    N_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Stores one int64 key per part: larger for larger logits, then for smaller ids; the maximum if a logit is not
    finite."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    source = logits + tl.program_id(0).to(tl.int64) * logits_stride
    ids = tl.program_id(1) * (N_BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = ids
    non_finite = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(N_BLOCKS):
        values = tl.load(source + ids, ids < size, 0.0).to(tl.float32)
        non_finite += values * 0.0  # NaN if a value is not finite
        is_better = (values > best) & (ids < size)
        best = tl.where(is_better, values, best)
        best_ids = tl.where(is_better, ids, best_ids)
        ids += BLOCK
    largest = tl.max(best, 0)
    first = tl.min(tl.where(best == largest, best_ids, 0x7FFFFFFF), 0)
    is_finite = tl.sum(non_finite, 0) == 0.0
    # Both zeros are equal; the bits of negative floats have the reverse order.
    bits = tl.where(largest == 0.0, 0, largest.to(tl.int32, bitcast=True))
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(is_finite, order, 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    tl.store(scratch + tl.program_id(0).to(tl.int64) * scratch_stride + tl.program_id(1), key)


@triton.jit(do_not_specialize_on_alignment=["scratch", "ids_out", "finite_out", "batch_slots", "last_tokens"])
def _best_of_rows(
    scratch: tl.tensor,
    ids_out: tl.tensor,
    finite_out: tl.tensor,
    batch_slots: tl.tensor,
    last_tokens: tl.tensor,
    scratch_stride: tl.tensor,
    STORES_LAST_TOKENS: tl.constexpr,
    N_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    keys = tl.load(scratch + row * scratch_stride + parts, parts < N_PARTS, -0x8000000000000000)
    best = tl.max(keys, 0)
    is_finite = (best >> 32) < 0x7FFFFFFF
    chosen = tl.where(is_finite, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), 0)
    tl.store(ids_out + row, chosen)
    if STORES_LAST_TOKENS:
        tl.store(last_tokens + tl.load(batch_slots + row), chosen)
    tl.store(finite_out + row, is_finite.to(tl.int32))
