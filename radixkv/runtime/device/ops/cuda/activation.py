"""The kernels of activations between an MLP's two matrix products."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_BLOCK = 2048
"""Columns per program."""


def silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """Computes ``out = silu(gate) * up`` in float32, rounded once.

    Args:
        gate_up: [rows, 2 * inner], gate first; bfloat16, float16 or float32; rows may be strided.
        out: [rows, inner], of the same dtype.
    """
    n_rows, size = out.shape
    _silu_and_multiply[n_rows, -(-size // _BLOCK)](
        gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=_BLOCK, num_warps=4, **overlapping(out)
    )


def square_positive(x: Tensor) -> None:
    """Replaces values by the squares of those above 0, and others by 0, each rounded once.

    Args:
        x: [rows, size] bfloat16, float16 or float32, contiguous.
    """
    n_rows, size = x.shape
    _square_positive[n_rows, -(-size // _BLOCK)](x, size, BLOCK=_BLOCK, num_warps=4, **overlapping(x))


@CachedKernel
@triton.jit
def _square_positive(x: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x + tl.program_id(0).to(tl.int64) * size + columns
    value = squared_positive(tl.load(place, columns < size, 0.0).to(tl.float32))
    tl.store(place, value.to(x.dtype.element_ty), columns < size)


@triton.jit
def squared_positive(value: tl.tensor) -> tl.tensor:
    """Returns the squares of float32 values above 0, and 0 for others but NaN."""
    positive = tl.maximum(value, 0.0, tl.PropagateNan.ALL)
    return positive * positive


@CachedKernel
@triton.jit
def _silu_and_multiply(
    gate_up: tl.tensor,
    out: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, is_column, 0.0).to(tl.float32)
    up = tl.load(source + size, is_column, 0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, activated.to(out.dtype.element_ty), is_column)
