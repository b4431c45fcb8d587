"""Matrix products: kernels that stream the weight for few rows, cuBLAS for more.

The kernel for one row starts to read the weight while the previous kernel, which computes ``x``, is still running.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import RmsFields, Rows
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.gated_linear import gated_tile, multiply_gated
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.programmatic_launch import (
    has_much_shared_memory,
    is_hopper_or_newer,
    overlapping,
    power_of_two,
)

_MAX_ROWS = 16
"""Most rows of ``multiply_vector`` and ``multiply_thin``; above, cuBLAS is as fast."""
_MANY_ROWS = 256
"""From this many rows on, cuBLAS adds the product to the residual stream: an 8B model's long runs take 0.4% less
time, with 256 rows per step and with prompts."""


@dataclass(frozen=True)
class LinearTile:
    """The tile of the weight that a program loads at a time."""

    rows: int
    columns: int
    n_warps: int = 4
    n_stages: int = 1
    """Tiles in flight at once, in the kernel for several rows."""


def linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes ``out = x @ weight.T``, with the same bits every time.

    One row, and up to 16 rows if the weight fits the tile, are summed in float32 by the kernels below. For other
    products torch may let cuBLAS round partial sums.

    Args:
        x: [rows, in], contiguous.
        weight: [out, in], contiguous.
        out: [rows, out]; rows may be strided.
    """
    if len(x) == 1:
        multiply_vector(x, weight, out, vector_tile(weight.shape[1]))
    elif _is_thin_faster(x, weight) and out.is_contiguous():
        multiply_thin(x, weight, out, thin_tile(len(weight), has_room=has_much_shared_memory(x)))
    else:
        torch.mm(x, weight.t(), out=out)


def gated_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes ``silu(x @ gate.T) * (x @ up.T)``, an MLP's first half.

    Allocates the product where one kernel does not do it all.

    Args:
        x: [rows, in], contiguous.
        weight: [2 * inner, in], gate first, contiguous.
        out: [rows, inner], contiguous.
    """
    if len(x) == 1:
        multiply_vector(x, weight, out, vector_tile(weight.shape[1]), gated=True)
    elif _is_fused_faster(x, weight):
        multiply_gated(x, weight, out, gated_tile(len(x)))
    else:
        gate_up = x.new_empty(len(x), len(weight))
        linear(x, weight, gate_up)
        silu_and_multiply(gate_up, out)


def add_linear_and_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: RmsFields, out: Rows) -> None:
    """Computes ``residual += x @ weight.T``, then ``out = rms_norm(residual)``.

    For many rows only the sum is rounded. For few rows the product is allocated, and both product and sum are
    rounded.

    Args:
        x: [rows, in], contiguous; it, weights and ``residual`` are of one dtype.
        weight: [hidden, in], contiguous.
        residual: [rows, hidden], contiguous.
        norm: of the sum.
        out: [rows, hidden]; see ``rms_norm``.
    """
    if len(x) >= _MANY_ROWS:
        residual.addmm_(x, weight.t())
        rms_norm(residual, norm, out)
        return
    product = residual.new_empty(residual.shape)
    linear(x, weight, product)
    rms_norm(product, norm, out, residual)


def _is_thin_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether ``multiply_thin`` is faster than cuBLAS.

    A weight with few outputs for its inputs gives few programs, which cannot use the whole bandwidth. An 8B model's
    steps of 2 to 8 rows take 2 to 5% less time if cuBLAS computes the down projection.
    """
    n_out, n_in = weight.shape
    is_faster = len(x) <= _MAX_ROWS and n_in <= 2 * n_out
    fits = n_out % 64 == 0 and n_in % 128 == 0
    return is_faster and fits and weight.dtype != torch.float32


def _is_fused_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether ``multiply_gated`` is faster than cuBLAS and a separate activation.

    On an H200, for an 8B model, it takes 66 µs at 128 rows, cuBLAS and the activation 72. At 256 rows it is as fast
    in a short burst, but 2.5% slower in long runs, which the GPU's power limits.
    """
    fits = weight.shape[0] % 16 == 0 and weight.shape[1] % 8 == 0 and weight.dtype != torch.float32
    return _MAX_ROWS < len(x) <= 128 and fits and is_hopper_or_newer(x)


def vector_tile(n_in: int) -> LinearTile:
    """Returns the fastest of 14 tiles on an H200 for matrices of an 8B model, or one within 2% of it."""
    return LinearTile(2, max(power_of_two(n_in), 128)) if n_in <= 4096 else LinearTile(4, 1024)


def thin_tile(n_out: int, *, has_room: bool) -> LinearTile:
    """Returns the fastest of 8 tiles on an H200, or one within 4% of it.

    Where programs are few, each has more tiles in flight.

    Args:
        n_out: rows of the weight.
        has_room: whether shared memory fits the larger number of stages.
    """
    return LinearTile(64, 128, n_stages=6 if n_out <= 16_384 and has_room else 4)


def multiply_vector(x: Tensor, weight: Tensor, out: Tensor, tile: LinearTile, *, gated: bool = False) -> None:
    """Computes ``linear`` or ``gated_linear`` of one row."""
    n_out, n_in = weight.shape
    _multiply_vector[(-(-n_out // tile.rows),)](
        x,
        weight,
        out,
        n_out,
        n_in,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GATED=gated,
        num_warps=tile.n_warps,
        **overlapping(x),
    )


@CachedKernel
@triton.jit
def _multiply_vector(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Prefetches the next tile of the weight while one is used, and the first tile before ``x`` is ready."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < n_out)[:, None]
    # With GATED, the gate and up rows of an output are adjacent.
    matrix_row = row // 2 + row % 2 * (n_out // 2) if GATED else row
    columns = tl.arange(0, COLUMNS)
    source = weight + matrix_row.to(tl.int64)[:, None] * n_in + columns[None, :]
    tile = tl.load(source, is_row & (columns < n_in)[None, :], 0.0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if OVERLAP:
        gdc_wait()
    for first in range(0, n_in, COLUMNS):
        source += COLUMNS
        next_tile = tl.load(source, is_row & (first + COLUMNS + columns < n_in)[None, :], 0.0)
        part = tl.load(x + first + columns, first + columns < n_in, 0.0)
        sums += tile.to(tl.float32) * part.to(tl.float32)[None, :]
        tile = next_tile
    dtype = out.dtype.element_ty
    product = tl.sum(sums, 1)
    if GATED:
        gate, up = tl.split(tl.reshape(product.to(dtype).to(tl.float32), [ROWS // 2, 2]))
        out_index = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(out + out_index, (gate / (1.0 + tl.exp(-gate)) * up).to(dtype), out_index < n_out // 2)
    else:
        tl.store(out + row, product.to(dtype), row < n_out)


def multiply_thin(x: Tensor, weight: Tensor, out: Tensor, tile: LinearTile) -> None:
    """Computes ``linear`` of 2 to 16 rows; both dimensions of the weight are multiples of the tile's."""
    n_out, n_in = weight.shape
    _multiply_thin[(n_out // tile.rows,)](
        x,
        weight,
        out,
        len(x),
        n_out,
        n_in,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.n_stages,
        num_warps=tile.n_warps,
        **overlapping(x),
    )


@CachedKernel
@triton.jit(do_not_specialize=["n_x"])
def _multiply_thin(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n_x: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Uses tensor cores with the weight's rows as the product's rows, and ``x`` padded to 16 rows."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_row = weight + row.to(tl.int64)[:, None] * n_in
    columns = tl.arange(0, COLUMNS)
    x_row = tl.arange(0, 16)[None, :]
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([ROWS, 16], tl.float32)
    for first in tl.range(0, n_in, COLUMNS, num_stages=STAGES):
        tile = tl.load(first_row + first + columns[None, :])
        part = tl.load(x + x_row * n_in + first + columns[:, None], x_row < n_x, 0.0)
        sums = tl.dot(tile, part, sums)
    tl.store(out + x_row * n_out + row[:, None], sums.to(out.dtype.element_ty), x_row < n_x)
