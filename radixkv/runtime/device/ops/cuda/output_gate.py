"""The kernel that multiplies outputs of attention, or of a shared expert, by the sigmoid of a gate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_BLOCK = 1024
"""Columns per program."""


def multiply_by_sigmoid(x: Tensor, gate: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Computes ``out = x * sigmoid(gate)`` in float32, rounded once; with ``adds`` adds that to ``out``.

    Args:
        x: [rows, size] bfloat16, float16 or float32, contiguous.
        gate: [rows, size] or [rows, 1], contiguous.
        out: of the shape and dtype of ``x``, contiguous; may be ``x``.
        adds: whether ``out`` has a sum.
    """
    n_rows, size = x.shape
    _multiply[n_rows, -(-size // _BLOCK)](
        x,
        gate,
        out,
        gate.shape[1],
        SIZE=size,
        BLOCK=_BLOCK,
        IS_ONE=gate.shape[1] == 1,
        ADDS=adds,
        num_warps=4,
        **overlapping(x),
    )


@CachedKernel
@triton.jit
def _multiply(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ONE: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    value = tl.load(x + row * SIZE + column, is_column, 0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_stride + (column * 0 if IS_ONE else column), is_column, 0.0).to(tl.float32)
    product = value / (1.0 + tl.exp(-factor))
    if ADDS:
        product += tl.load(out + row * SIZE + column, is_column, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, product.to(out.dtype.element_ty), is_column)
