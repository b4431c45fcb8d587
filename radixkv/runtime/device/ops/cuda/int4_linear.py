"""Products of activations in 16 bits with 4-bit matrices, which are converted while they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory, overlapping
from radixkv.runtime.device.weights.int4_matrix import QUARTER, UNIT, ZERO_BITS, Int4Matrix

_MAX_ROWS = 256
"""Most rows of ``multiply_int4``. With more, cuBLAS multiplies the matrix in 16 bits, which is written and read
once for that."""
_ROWS = 16
"""Output channels of a program of ``dequantize_int4``."""
_COLUMNS = tl.constexpr(QUARTER)
_UNIT = tl.constexpr(UNIT)
_ZERO = tl.constexpr(ZERO_BITS)


@dataclass(frozen=True)
class Int4Tile:
    """The tile of a program of ``multiply_int4``."""

    n_out: int
    """Output channels."""
    n_rows: int
    """Rows of the activations."""
    n_units: int
    """Units of 128 inputs of a step of the loop."""
    n_warps: int = 4
    n_stages: int = 4
    """Steps of the loop in flight."""


def int4_linear(x: Tensor, weight: Int4Matrix, out: Tensor) -> None:
    """Computes ``out = x @ weight.T``, with the same bits every time.

    With more than 256 rows this takes temporary memory for the matrix in 16 bits.

    Args:
        x: [rows, in], contiguous, bfloat16 or float16.
        weight: [out, in], contiguous.
        out: [rows, out], contiguous.
    """
    if len(x) > _MAX_ROWS:
        dense = x.new_empty(len(weight), weight.n_in)
        dequantize_int4(weight, dense)
        torch.mm(x, dense.t(), out=out)
    else:
        multiply_int4(x, weight, out, int4_tile(len(x), len(weight), has_room=has_much_shared_memory(x)))


def int4_tile(n_rows: int, n_out: int, *, has_room: bool) -> Int4Tile:
    """Returns the tile of a product.

    Args:
        n_rows: rows of the activations.
        n_out: output channels. Few of them are cut into more programs, so that all multiprocessors read.
        has_room: whether a program may use 163 KB of shared memory.
    """
    if n_rows <= 16:
        if n_out <= 8192:
            return Int4Tile(32, 16, 4, n_warps=2, n_stages=4 if has_room else 3)
        return Int4Tile(64, 16, 2, n_stages=4)
    if n_rows <= 32:
        return Int4Tile(64, 32, 1, n_stages=5 if has_room else 4)
    return Int4Tile(64, 64, 1, n_stages=4) if n_rows <= 64 or not has_room else Int4Tile(128, 128, 1, 8, 3)


def multiply_int4(x: Tensor, weight: Int4Matrix, out: Tensor, tile: Int4Tile) -> None:
    """Computes ``out = x @ weight.T``, as ``int4_linear`` does."""
    n_out = len(weight)
    _multiply_int4[triton.cdiv(n_out, tile.n_out) * triton.cdiv(len(x), tile.n_rows),](
        x,
        weight.values,
        weight.scales,
        out,
        len(x),
        n_out,
        weight.n_in,
        weight.group_size,
        len(weight.scales),
        ROWS=tile.n_out,
        X_ROWS=tile.n_rows,
        UNITS=tile.n_units,
        STAGES=tile.n_stages,
        IS_EVEN=weight.n_in % (tile.n_units * UNIT) == 0,
        HAS_WIDE_GROUPS=has_wide_groups(weight),
        USES_PTX=x.is_cuda,
        num_warps=tile.n_warps,
        **overlapping(x),
    )


def dequantize_int4(weight: Int4Matrix, out: Tensor) -> None:
    """Writes the matrix into ``out`` [out, in], contiguous, rounded to its dtype."""
    n_out, n_in = out.shape
    _dequantize_int4[triton.cdiv(n_out, _ROWS), triton.cdiv(n_in, UNIT)](
        weight.values,
        weight.scales,
        out,
        n_out,
        n_in,
        weight.group_size,
        len(weight.scales),
        ROWS=_ROWS,
        **overlapping(out),
    )


def has_wide_groups(weight: Int4Matrix) -> bool:
    """Whether a unit of 128 inputs is within one group."""
    return len(weight.scales) == 1 or weight.group_size % UNIT == 0


@triton.jit(do_not_specialize=["n_x"])
def _multiply_int4(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n_x: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    group_size: tl.tensor,
    n_groups: tl.tensor,
    ROWS: tl.constexpr,
    X_ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_WIDE_GROUPS: tl.constexpr,
    USES_PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Uses tensor cores with the weight's rows as the product's rows.

    Programs of the same rows of the weight are consecutive, so that they share it in the cache. Sums of a group are
    multiplied by its scale, so that a weight costs a shift, a mask and a subtraction for each two.
    """
    if OVERLAP:
        gdc_launch_dependents()
    n_x_tiles = tl.cdiv(n_x, X_ROWS)
    row = (tl.program_id(0) // n_x_tiles * ROWS + tl.arange(0, ROWS)) % n_out
    x_row = tl.program_id(0) % n_x_tiles * X_ROWS + tl.arange(0, X_ROWS)
    column = tl.arange(0, _COLUMNS)
    n_units = tl.cdiv(n_in, _UNIT)
    # Channels after the last are read as others, and are not stored.
    source = values + row.to(tl.int64)[:, None] * (n_units * _COLUMNS) + column[None, :]
    x_source = x + x_row.to(tl.int64)[None, :] * n_in + column[:, None]
    is_x = (x_row < n_x)[None, :]
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([ROWS, X_ROWS], tl.float32)
    for first in tl.range(0, n_units, UNITS, num_stages=STAGES):
        for index in tl.static_range(UNITS):
            unit = first + index
            if IS_EVEN:
                words = tl.load(source + unit * _COLUMNS)
            else:
                words = tl.load(source + unit * _COLUMNS, (unit < n_units) & (row >= 0)[:, None], 0)
            group = tl.minimum(unit * _UNIT // group_size, n_groups - 1)
            scale = tl.load(scales + group * n_out + row)
            partial = tl.zeros([ROWS, X_ROWS], tl.float32)
            for quarter in tl.static_range(4):
                begin = unit * _UNIT + quarter * _COLUMNS
                if not HAS_WIDE_GROUPS:
                    group = tl.minimum(begin // group_size, n_groups - 1)
                    scale = tl.load(scales + group * n_out + row)
                if IS_EVEN:
                    part = tl.load(x_source + begin, is_x, 0.0)
                else:
                    part = tl.load(x_source + begin, is_x & (begin + column < n_in)[:, None], 0.0)
                weights = _differences(words, (scale & _ZERO)[:, None], quarter, part.dtype, USES_PTX)
                if HAS_WIDE_GROUPS:
                    partial = tl.dot(weights, part, partial)
                else:
                    sums += tl.dot(weights, part) * _scale(scale)[:, None]
            if HAS_WIDE_GROUPS:
                sums += partial * _scale(scale)[:, None]
    out_row = tl.program_id(0) // n_x_tiles * ROWS + tl.arange(0, ROWS)
    is_stored = (out_row < n_out)[:, None] & (x_row < n_x)[None, :]
    target = out + x_row.to(tl.int64)[None, :] * n_out + out_row[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), is_stored)


@triton.constexpr_function
def _subtraction(shift: int, is_float16: bool) -> str:
    """Returns the PTX of ``_differences`` for two values."""
    kind, base, one = ("f16x2", 0x6400, 0x3C00) if is_float16 else ("bf16x2", 0x4300, 0x3F80)
    return (
        f"{{ .reg .b32 t, one; shr.u32 t, $1, {shift}; lop3.b32 t, t, 0x000F000F, {base << 16 | base:#x}, 0xEA; "
        f"mov.b32 one, {one << 16 | one:#x}; fma.rn.{kind} $0, t, one, $2; }}"
    )


@triton.jit
def _scale(word: tl.tensor) -> tl.tensor:
    return (word & ~_ZERO).to(tl.float32, bitcast=True)


@triton.jit
def _differences(
    words: tl.tensor, zeros: tl.tensor, quarter: tl.constexpr, dtype: tl.constexpr, USES_PTX: tl.constexpr
) -> tl.tensor:
    """Returns the values of a quarter minus their zero points, in 16 bits, without rounding.

    The bits of a value, put below those of 128 in bfloat16 or of 1024 in float16, give that number plus the value.
    The zero point becomes minus that number minus the zero point in the same way. PTX does it for two values at
    once; Triton alone would convert each by itself.
    """
    exponent: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
    shift: tl.constexpr = 4 * quarter
    if USES_PTX:
        minus = tl.broadcast_to((zeros | (exponent | 0x8000)).to(tl.int16), words.shape)
        return tl.inline_asm_elementwise(
            _subtraction(shift, dtype == tl.float16),
            "=r,r,r",
            [words, minus],
            dtype=dtype.value,
            is_pure=True,
            pack=2,
        )
    bits = (words.to(tl.int32) >> shift & 15) | exponent
    base: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
    return bits.to(tl.int16).to(dtype, bitcast=True) - (zeros.to(tl.float32) + base).to(dtype)


@triton.jit
def _dequantize_int4(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    group_size: tl.tensor,
    n_groups: tl.tensor,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes 128 inputs of some rows."""
    if OVERLAP:
        gdc_launch_dependents()
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, _COLUMNS)
    unit = tl.program_id(1)
    is_row = row < n_out
    n_words = tl.cdiv(n_in, _UNIT) * _COLUMNS
    source = values + row.to(tl.int64)[:, None] * n_words + unit * _COLUMNS + column[None, :]
    if OVERLAP:
        gdc_wait()
    words = tl.load(source, is_row[:, None], 0).to(tl.int32)
    for quarter in tl.static_range(4):
        begin = unit * _UNIT + quarter * _COLUMNS
        group = tl.minimum(begin // group_size, n_groups - 1)
        scale = tl.load(scales + group * n_out + row, is_row, 0)
        dense = ((words >> 4 * quarter & 15) - (scale & _ZERO)[:, None]).to(tl.float32) * _scale(scale)[:, None]
        target = out + row.to(tl.int64)[:, None] * n_in + (begin + column)[None, :]
        tl.store(target, dense.to(out.dtype.element_ty), is_row[:, None] & (begin + column < n_in)[None, :])
