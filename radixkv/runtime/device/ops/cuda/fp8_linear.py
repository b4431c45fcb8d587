"""Products of activations with FP8 matrices: a Triton kernel for few rows, torch's scaled product for more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import Fp8Rows
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory, is_hopper, overlapping
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix


@dataclass(frozen=True)
class Fp8Tile:
    """The tile of a program of ``multiply_fp8``."""

    n_out: int
    """Output channels."""
    n_rows: int
    """Rows of the activations."""
    n_in: int
    """Inputs of a step of the loop."""
    n_warps: int = 4
    n_stages: int = 4
    """Steps of the loop in flight."""


def fp8_linear(x: Fp8Rows, weight: Fp8Matrix, out: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T``, [rows, out], in the dtype of ``x``, with the same bits every time.

    Products are summed as the tensor cores of FP8 do, which on Hopper keep fewer bits than float32. Of float16,
    torch's scaled product gives bfloat16's precision.

    Args:
        x: [rows, in], with a scale for each 128 values if the matrix has blocks.
        weight: [out, in].
        out: memory for it, [rows, out], whose first rows are returned; they may be strided. Where it has a row for
            each of ``x.values``, padding may be written too, and no product is copied. None allocates it.
    """
    if _is_scaled_faster(x.n_rows, weight, on_hopper=is_hopper(weight.values)):
        return _multiply_scaled(x, weight, out)
    if out is None:
        out = torch.empty(x.n_rows, len(weight), dtype=x.dtype, device=x.values.device)
    out = out[: x.n_rows]
    tile = fp8_tile(x.n_rows, weight, has_room=has_much_shared_memory(out))
    multiply_fp8(x.values[: x.n_rows], x.scales, weight, out, tile)
    return out


def _is_scaled_faster(n_rows: int, weight: Fp8Matrix, *, on_hopper: bool) -> bool:
    """Whether torch's scaled product is faster, and takes such a matrix.

    On an H200, for the matrices of a layer of an 8B model with a scale for each channel, it takes 99 µs at 128 rows
    and the Triton kernel 105; at 64 rows 103 and 87. With blocks it is slower at one row only.
    """
    n_out, n_in = weight.values.shape
    if weight.has_blocks:
        # cuBLAS wants the scales of blocks in columns of a multiple of 4.
        return on_hopper and n_rows > 1 and n_out % BLOCK == n_in % (4 * BLOCK) == 0
    return n_rows > 64 and n_out % 16 == n_in % 16 == 0


def fp8_tile(n_rows: int, weight: Fp8Matrix, *, has_room: bool) -> Fp8Tile:
    """Returns the fastest of 4 to 6 tiles on an H200, or one within 5% of it.

    Args:
        n_rows: rows of the activations.
        weight: [out, in].
        has_room: whether a program may use 163 KB of shared memory.
    """
    if n_rows <= 16:
        if weight.has_blocks or not has_room:
            return Fp8Tile(64, 16, 128, n_stages=6)
        return Fp8Tile(64, 16, 256, n_stages=6 if len(weight) <= 16_384 else 4)
    if n_rows <= 32 or not has_room:
        return Fp8Tile(64, 32, 128, n_stages=6 if has_room else 4)
    if n_rows <= 64 and not weight.has_blocks:
        return Fp8Tile(64, 64, 256, n_stages=3)
    return Fp8Tile(64, 64, 128, n_stages=4) if n_rows <= 64 else Fp8Tile(64, 128, 128, n_stages=4)


def weight_only_tile(n_rows: int) -> Fp8Tile:
    """Returns the tile of a product of activations in 16 bits."""
    return Fp8Tile(64, 16, 128) if n_rows <= 16 else Fp8Tile(64, 64, 64, n_stages=3)


def _multiply_scaled(x: Fp8Rows, weight: Fp8Matrix, out: Tensor | None) -> Tensor:
    scales = weight.scales.t() if weight.has_blocks else weight.scales[None, :]
    multiply = partial(
        torch._scaled_mm,
        x.values,
        weight.values.t(),
        x.scales,
        scales,
        out_dtype=torch.bfloat16,  # torch gives nothing else where channels have scales
        use_fast_accum=not weight.has_blocks,
    )
    if out is None:
        return multiply()[: x.n_rows].to(x.dtype)
    whole = out[: len(x.values)]
    if weight.has_blocks and takes_product(whole, len(x.values)):
        multiply(out=whole)
    else:
        out[: x.n_rows].copy_(multiply()[: x.n_rows])
    return out[: x.n_rows]


def takes_product(out: Tensor, n_rows: int) -> bool:
    """Returns whether cuBLAS can write a product of blocks straight to memory.

    Args:
        out: the memory, [rows, out]; rows may be strided.
        n_rows: of the product, padding included.
    """
    is_aligned = out.data_ptr() % 16 == out.stride(0) * out.itemsize % 16 == 0
    return len(out) == n_rows and out.dtype == torch.bfloat16 and out.stride(1) == 1 and is_aligned


def multiply_fp8(x: Tensor, x_scales: Tensor | None, weight: Fp8Matrix, out: Tensor, tile: Fp8Tile) -> None:
    """Computes ``out = x @ weight.T``.

    Args:
        x: [rows, in], contiguous; e4m3, or 16 bits to convert the matrix instead, as a GPU without FP8 must.
        x_scales: of ``Fp8Rows``; None if ``x`` has 16 bits.
        weight: [out, in], contiguous.
        out: [rows, out]; rows may be strided.
        tile: of a program.
    """
    n_out, n_in = weight.values.shape
    has_blocks = weight.has_blocks
    _multiply_fp8[-(-n_out // tile.n_out) * -(-len(x) // tile.n_rows),](
        x,
        weight.scales if x_scales is None else x_scales,
        weight.values if x_scales is not None else weight.values.view(torch.uint8),
        weight.scales,
        out,
        len(x),
        n_out,
        n_in,
        out.stride(0),
        weight.scales.stride(0) if has_blocks else 0,
        0 if x_scales is None else x_scales.stride(1),
        ROWS=tile.n_out,
        X_ROWS=tile.n_rows,
        COLUMNS=tile.n_in,
        STAGES=tile.n_stages,
        SCALE_BLOCK=BLOCK if has_blocks else 0,
        IS_EVEN=n_in % tile.n_in == 0,
        CONVERTS=x_scales is None,
        num_warps=tile.n_warps,
        **overlapping(out),
    )


@CachedKernel
@triton.jit(do_not_specialize=["n_x", "x_group_stride"])
def _multiply_fp8(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n_x: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    out_stride: tl.tensor,
    scale_stride: tl.tensor,
    x_group_stride: tl.tensor,
    ROWS: tl.constexpr,
    X_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CONVERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Uses tensor cores with the weight's rows as the product's rows.

    Programs of the same rows of the weight are consecutive, so that they share it in the cache.
    """
    if OVERLAP:
        gdc_launch_dependents()
    n_x_tiles = tl.cdiv(n_x, X_ROWS)
    row = tl.program_id(0) // n_x_tiles * ROWS + tl.arange(0, ROWS)
    x_row = tl.program_id(0) % n_x_tiles * X_ROWS + tl.arange(0, X_ROWS)
    columns = tl.arange(0, COLUMNS)
    # Channels after the last are read as others, and are not stored.
    source = weight + (row % n_out).to(tl.int64)[:, None] * n_in + columns[None, :]
    x_source = x + x_row.to(tl.int64)[None, :] * n_in + columns[:, None]
    is_x = (x_row < n_x)[None, :]
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([ROWS, X_ROWS], tl.float32)
    for first in tl.range(0, n_in, COLUMNS, num_stages=STAGES):
        if IS_EVEN:
            tile = tl.load(source + first)
            part = tl.load(x_source + first, is_x, 0.0)
        else:
            is_column = first + columns < n_in
            tile = tl.load(source + first, is_column[None, :], 0.0)
            part = tl.load(x_source + first, is_x & is_column[:, None], 0.0)
        if CONVERTS:
            tile = _widened(tile, part.dtype)
        if SCALE_BLOCK:
            product = tl.dot(tile, part)
            factor = tl.load(scales + row % n_out // SCALE_BLOCK * scale_stride + first // SCALE_BLOCK)[:, None]
            if not CONVERTS:
                x_group = x_scales + x_row + first // SCALE_BLOCK * x_group_stride
                factor = factor * tl.load(x_group, x_row < n_x, 0.0)[None, :]
            sums += product * factor
        else:
            sums = tl.dot(tile, part, sums)
    if not SCALE_BLOCK:
        sums *= tl.load(scales + row % n_out)[:, None]
        if not CONVERTS:
            sums *= tl.load(x_scales + x_row, x_row < n_x, 0.0)[None, :]
    is_stored = (row < n_out)[:, None] & (x_row < n_x)[None, :]
    tl.store(out + x_row[None, :] * out_stride + row[:, None], sums.to(out.dtype.element_ty), is_stored)


@triton.jit
def _widened(tile: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns e4m3 numbers, given as bytes, in 16 bits.

    Their bits are put where the other format has exponent and fraction, which gives them times 2^-8 in float16 and
    2^-120 in bfloat16, by the difference of the exponents' biases; also those that are subnormal. Both formats hold
    them after the multiplication without rounding.
    """
    bits = tile.to(tl.uint16)
    sign = (bits & 0x80) << 8
    if dtype == tl.float16:
        return (sign | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return (sign | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
