"""The fused kernel of an MLP's first half for 17 to 128 rows: both matrix products and the activation."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_COLUMNS, _DEPTH = 64, 64
"""Output columns per program, and its step along the inner dimension."""


@dataclass(frozen=True)
class GatedTile:
    """Tile of a program. Two programs fit on a multiprocessor, so that one starts while another ends."""

    rows: int
    """Output rows per program."""
    n_stages: int
    """Pipeline stages of Triton's loop."""


def gated_tile(n_rows: int) -> GatedTile:
    """Returns the faster tile on an H200: 61 µs at 64 rows of an 8B model and 71 µs at 128; the
    other tile takes 90 and 75."""
    return GatedTile(64, 4) if n_rows <= 64 else GatedTile(128, 3)


def multiply_gated(x: Tensor, weight: Tensor, out: Tensor, tile: GatedTile) -> None:
    """Computes ``silu(x @ gate.T) * (x @ up.T)``; the products are rounded before the activation.

    Needs Hopper or newer.

    Args:
        x: [rows, in] bfloat16 or float16, contiguous; in is a multiple of 8.
        weight: [2 * inner, in], gate first, contiguous.
        out: [rows, inner], contiguous; inner is a multiple of 8.
        tile: from ``gated_tile``.
    """
    n_rows, n_in = x.shape
    n_inner = out.shape[1]
    n_row_tiles = -(-n_rows // tile.rows)
    _multiply_gated[(n_row_tiles * -(-n_inner // _COLUMNS),)](
        TensorDescriptor.from_tensor(x, [tile.rows, _DEPTH]),
        TensorDescriptor.from_tensor(weight, [_COLUMNS, _DEPTH]),
        TensorDescriptor.from_tensor(out, [tile.rows, _COLUMNS]),
        n_row_tiles,
        n_inner,
        n_in,
        ROWS=tile.rows,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=tile.n_stages,
        **overlapping(x),
    )


@triton.jit(do_not_specialize=["n_row_tiles"])
def _multiply_gated(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n_row_tiles: tl.tensor,
    n_inner: tl.tensor,
    n_in: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Programs of the same columns are consecutive, so that they share the weight in the cache."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) % n_row_tiles * ROWS
    column = tl.program_id(0) // n_row_tiles * COLUMNS
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, n_in, DEPTH):
        part = x.load([row, first])
        gate = tl.dot(part, weight.load([column, first]).T, gate)
        up = tl.dot(part, weight.load([n_inner + column, first]).T, up)
    gate = gate.to(out.dtype).to(tl.float32)
    up = up.to(out.dtype).to(tl.float32)
    out.store([row, column], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))
