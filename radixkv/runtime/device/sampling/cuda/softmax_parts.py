"""The kernels that reduce rows of logits part by part, for drawing and logprobs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.ops.cuda.programmatic_launch import power_of_two

PART: tl.constexpr = tl.constexpr(4096)
"""Logits per part; one program reads a part."""
GROUP: tl.constexpr = tl.constexpr(64)
"""Consecutive logits of which ``group_maxima`` stores the largest."""
LOG2_E = 1.4426950408889634
"""log2(e)."""


def n_parts(vocab_size: int) -> int:
    """Returns the number of parts of a row."""
    return int(triton.cdiv(vocab_size, PART.value))


def parts_width(vocab_size: int) -> int:
    """Returns the smallest power of two of at least ``n_parts``."""
    return power_of_two(n_parts(vocab_size))


def weigh_parts(values: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
    """Computes each part's largest value m, and the sum of 2 ** ((value - m) * scale); one launch.

    Args:
        values: [any, vocab], any float dtype.
        rows: [n] int32, indices of the rows to read.
        scales: [n] float32.

    Returns:
        [n, 2, parts] float32: maxima and sums. The sum is NaN if a value is NaN or +inf; -inf has weight 0.
    """
    size = values.shape[1]
    parts = torch.empty(len(rows), 2, n_parts(size), dtype=torch.float32, device=values.device)
    _weigh_parts[len(rows), parts.shape[2]](
        values, rows, scales, parts, values.stride(0), parts.shape[2], size, BLOCK=PART.value, num_warps=8
    )
    return parts


def group_maxima(values: Tensor, rows: Tensor) -> Tensor:
    """Returns [n, groups] float32: the largest of every ``GROUP`` consecutive values; one launch."""
    size = values.shape[1]
    maxima = torch.empty(len(rows), triton.cdiv(size, GROUP.value), dtype=torch.float32, device=values.device)
    _group_maxima[len(rows), n_parts(size)](
        values,
        rows,
        maxima,
        values.stride(0),
        maxima.shape[1],
        size,
        N_GROUPS=PART.value // GROUP.value,
        SIZE=GROUP.value,
        num_warps=8,
    )
    return maxima


@triton.jit
def load_values(values: tl.tensor, ids: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Loads values as float32; -inf for ids after the end."""
    return tl.load(values + ids, ids < size, float("-inf")).to(tl.float32)


@triton.jit
def weights_of(values: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns weights relative to ``top``: 1 for the largest value, 0 for -inf."""
    return tl.exp2((values - top) * scale)


@triton.jit(do_not_specialize_on_alignment=["rows", "scales"])
def _weigh_parts(
    values: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    n_parts: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    part_values = load_values(values + tl.load(rows + row).to(tl.int64) * stride, ids, size)
    top = tl.max(part_values, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(parts + (2 * row) * n_parts + part, top)
    tl.store(
        parts + (2 * row + 1) * n_parts + part, tl.sum(weights_of(part_values, base, tl.load(scales + row)), 0)
    )


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _group_maxima(
    values: tl.tensor,
    rows: tl.tensor,
    maxima: tl.tensor,
    stride: tl.tensor,
    n_groups: tl.tensor,
    size: tl.tensor,
    N_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * N_GROUPS + tl.arange(0, N_GROUPS)
    ids = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    part_values = load_values(values + tl.load(rows + row).to(tl.int64) * stride, ids, size)
    tl.store(maxima + row * n_groups + groups, tl.max(part_values, 1), groups < n_groups)
