"""Products of activations in 16 bits with 4-bit matrices: a kernel for few rows, cuBLAS for more."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.int4_product import Int4Tile, multiply_int4
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping
from radixkv.runtime.device.weights.int4_matrix import PER_WORD, ZERO_BITS, Int4Matrix

MAX_ROWS = 64
"""Most rows of ``multiply_int4``. For gate and up projection of an 8B model and 64 rows an H200 takes 126 µs.
Writing them in 16 bits first takes 150 µs, and 172 µs with 256 rows."""
_DENSE_BYTES = 128 << 20
"""About the memory of a part of a matrix in 16 bits. Parts of 32 MiB stay in the cache, but cuBLAS takes up to
twice as long for them as for the whole matrix."""
_PART_UNIT = 128
"""Parts have a multiple of these rows, because cuBLAS needs aligned outputs to be fast."""
_ROWS = 4
_WORDS = 128
_PER_WORD = tl.constexpr(PER_WORD)
_ZERO = tl.constexpr(ZERO_BITS)


def int4_linear(x: Tensor, weight: Int4Matrix, out: Tensor, *, dense_bytes: int = _DENSE_BYTES) -> None:
    """Computes ``out = x @ weight.T``, with the same bits every time.

    With more than 64 rows, parts of the matrix are written in 16 bits, and cuBLAS multiplies them.

    Args:
        x: [rows, in], contiguous, bfloat16 or float16.
        weight: [out, in].
        out: [rows, out], contiguous.
        dense_bytes: of a part in 16 bits; exceeded by less than 128 rows.
    """
    if len(x) <= MAX_ROWS:
        multiply_int4(x, weight, out, int4_tile(len(x), weight))
        return
    n_parts = triton.cdiv(len(weight) * weight.n_in * x.itemsize, dense_bytes)
    n_part = triton.cdiv(triton.cdiv(len(weight), n_parts), _PART_UNIT) * _PART_UNIT
    dense = x.new_empty(min(n_part, len(weight)), weight.n_in)
    for begin in range(0, len(weight), n_part):
        part = weight.rows(begin, begin + n_part)
        dequantize_int4(part, dense[: len(part)])
        torch.mm(x, dense[: len(part)].t(), out=out[:, begin : begin + n_part])


def int4_tile(n_rows: int, weight: Int4Matrix) -> Int4Tile:
    """Returns the fastest of 14 to 26 tiles on an H200, or one within 10% of it.

    Args:
        n_rows: rows of the activations.
        weight: [out, in].
    """
    is_tall, is_wide = len(weight) > 16_384, weight.n_in > 8192
    if n_rows <= 8:
        if is_wide:
            return Int4Tile(16, 8, 8, 2, 128)
        return Int4Tile(16, 8, 4, 1, 80) if is_tall else Int4Tile(16, 8, 4, 4, 168)
    if is_tall:
        return Int4Tile(64, 16 if n_rows <= 16 else 32, 4, 1)
    if n_rows <= 16:
        return Int4Tile(32, 16, 8, 1) if is_wide else Int4Tile(32, 16, 4, 2)
    if n_rows <= 32:
        return Int4Tile(32, 16, 4, 2) if is_wide else Int4Tile(32, 16, 4, 1)
    return Int4Tile(64, 16, 4, 1) if is_wide else Int4Tile(32, 16, 4, 1)


def dequantize_int4(weight: Int4Matrix, out: Tensor) -> None:
    """Writes the matrix into ``out`` [out, in], contiguous, rounded to its dtype."""
    n_out, n_in = out.shape
    n_words = weight.values.shape[1]
    _dequantize_int4[-(-n_out // _ROWS), -(-n_words // _WORDS)](
        weight.values,
        weight.scales,
        out,
        n_out,
        n_in,
        n_words,
        weight.scales.stride(0),
        weight.group_size,
        ROWS=_ROWS,
        WORDS=_WORDS,
        **overlapping(out),
    )


@CachedKernel
@triton.jit
def _dequantize_int4(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    n_words: tl.tensor,
    scale_stride: tl.tensor,
    group_size: tl.tensor,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes some rows of some words, whose eight inputs are in one group."""
    if OVERLAP:
        gdc_launch_dependents()
    row, word = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = (row < n_out)[:, None] & (word * _PER_WORD < n_in)[None, :]
    words = tl.load(values + row.to(tl.int64)[:, None] * n_words + word[None, :], is_word, 0)
    group = word * _PER_WORD // group_size
    scale = tl.load(scales + group[None, :] * scale_stride + row[:, None], is_word, 0)
    # Conversions of integers are slow: the bits of a value, below those of 2**23, are a float32 as they are.
    zero = (scale & _ZERO).to(tl.float32) + 8388608.0
    factor = (scale & ~_ZERO).to(tl.float32, bitcast=True)
    dtype: tl.constexpr = out.dtype.element_ty
    even = tl.join(
        tl.join(_weight(words, 0, zero, factor, dtype), _weight(words, 8, zero, factor, dtype)),
        tl.join(_weight(words, 4, zero, factor, dtype), _weight(words, 12, zero, factor, dtype)),
    )
    odd = tl.join(
        tl.join(_weight(words, 16, zero, factor, dtype), _weight(words, 24, zero, factor, dtype)),
        tl.join(_weight(words, 20, zero, factor, dtype), _weight(words, 28, zero, factor, dtype)),
    )
    dense = tl.reshape(tl.join(even, odd), [ROWS, WORDS * _PER_WORD])
    column = tl.program_id(1) * WORDS * _PER_WORD + tl.arange(0, WORDS * _PER_WORD)
    if OVERLAP:
        gdc_wait()
    target = out + row.to(tl.int64)[:, None] * n_in + column[None, :]
    tl.store(target, dense, (row < n_out)[:, None] & (column < n_in)[None, :])


@triton.jit
def _weight(
    words: tl.tensor, shift: tl.constexpr, zero: tl.tensor, factor: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    value = (words >> shift & 15 | 0x4B000000).to(tl.float32, bitcast=True)
    return ((value - zero) * factor).to(dtype)
