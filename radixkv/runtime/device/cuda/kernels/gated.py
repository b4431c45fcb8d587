"""An MLP's first half for a few hundred rows: both matrix products and the activation in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from radixkv.runtime.device.cuda.kernels.launch import overlapping

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
"""A program's tile of the output, and how much of the inner dimension it multiplies at a time."""


def multiply_gated(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``silu(x @ gate.T) * (x @ up.T)``; the products are rounded before the activation. From Hopper on.

    Args:
        x: [rows, in] bfloat16 or float16, contiguous; in is a multiple of 8.
        weight: [2 * inner, in], gate first, contiguous.
        out: [rows, inner], contiguous; inner is a multiple of 8.
    """
    n_rows, n_in = x.shape
    n_inner = out.shape[1]
    n_tiles = triton.cdiv(n_rows, _ROWS) * triton.cdiv(n_inner, _COLUMNS)
    _multiply_gated[(min(n_tiles, _n_processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [_ROWS, _DEPTH]),
        TensorDescriptor.from_tensor(weight, [_COLUMNS, _DEPTH]),
        TensorDescriptor.from_tensor(out, [_ROWS, _COLUMNS]),
        n_rows,
        n_inner,
        n_in,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        num_warps=8,
        num_stages=3,
        **overlapping(x),
    )


def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["n_rows"])
def _multiply_gated(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n_rows: tl.tensor,
    n_inner: tl.tensor,
    n_in: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Programs take tiles in turns; those of the same columns come together, and share the weight in the cache."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    n_row_tiles = tl.cdiv(n_rows, ROWS)
    n_tiles = n_row_tiles * tl.cdiv(n_inner, COLUMNS)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tile % n_row_tiles * ROWS
        column = tile // n_row_tiles * COLUMNS
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(0, n_in, DEPTH):
            part = x.load([row, first])
            gate = tl.dot(part, weight.load([column, first]).T, gate)
            up = tl.dot(part, weight.load([n_inner + column, first]).T, up)
        gate = gate.to(out.dtype).to(tl.float32)
        up = up.to(out.dtype).to(tl.float32)
        out.store([row, column], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))
