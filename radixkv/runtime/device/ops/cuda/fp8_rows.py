"""Kernels that round activations to FP8 (e4m3), with a scale for each row or for each 128 values of a row."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX
from radixkv.runtime.device.ops.base import Fp8Rows, RmsFields, Rows, RowScales, padded_rows
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix

_LARGEST = tl.constexpr(FP8_MAX)
_VALUES = 2048
"""Values that a program rounds, if a row or group has fewer: so it has several loads in flight."""
_SMALLEST = tl.constexpr(1e-10)
"""The least maximum that a scale is computed from, so that zeros have a scale."""


def row_scales(weight: Fp8Matrix) -> RowScales:
    """Returns the scales of rows that are multiplied with ``weight``."""
    return "groups" if weight.has_blocks else "rows"


def new_rows(like: Tensor, scales: RowScales | None, *, keeps_unrounded: bool = False) -> Rows:
    """Allocates rows of the shape of ``like``, [rows, size].

    Args:
        like: of the dtype that is computed.
        scales: of rows in FP8; None for a tensor of that dtype.
        keeps_unrounded: whether rows in FP8 are kept as they were before, too.
    """
    if scales is None:
        return torch.empty_like(like)
    rows = _new_fp8_rows(like, like.shape[1], scales)
    return replace(rows, unrounded=like.new_empty(like.shape)) if keeps_unrounded else rows


def rows_of(norm: RmsFields, like: Tensor) -> Rows:
    """Allocates the output of a norm of rows of the shape of ``like``, [rows, size]."""
    return new_rows(like, norm.out_scales, keeps_unrounded=norm.keeps_unrounded)


def quantize_rows(x: Tensor, scales: RowScales) -> Fp8Rows:
    """Rounds rows to FP8, each scaled so that its largest value, or that of each 128 values, becomes 448.

    Args:
        x: [rows, size] bfloat16, float16 or float32; rows may be strided.
        scales: of the result.
    """
    return _quantized(x, x.shape[1], scales, is_gated=False)


def silu_and_multiply_to_fp8(gate_up: Tensor, scales: RowScales) -> Fp8Rows:
    """Computes ``silu(gate) * up`` in float32, and rounds it as ``quantize_rows`` does.

    Args:
        gate_up: [rows, 2 * inner], gate first; bfloat16, float16 or float32; rows may be strided.
        scales: of the result.
    """
    return _quantized(gate_up, gate_up.shape[1] // 2, scales, is_gated=True)


def _new_fp8_rows(like: Tensor, size: int, scales: RowScales) -> Fp8Rows:
    n_rows, n_padded, n_groups = len(like), len(like), 1
    if scales == "groups":
        n_padded, n_groups = padded_rows(n_rows), -(-size // BLOCK)
    return Fp8Rows(
        n_rows,
        torch.empty(n_padded, size, dtype=FP8, device=like.device),
        torch.empty(n_groups, n_padded, dtype=torch.float32, device=like.device).t(),
        like.dtype,
    )


def _quantized(x: Tensor, size: int, scales: RowScales, *, is_gated: bool) -> Fp8Rows:
    rows = _new_fp8_rows(x, size, scales)
    width = BLOCK if scales == "groups" else power_of_two(max(size, BLOCK))
    n_pieces = len(x) * -(-size // width)
    n_at_once = max(1, _VALUES // width)
    _quantize[(-(-n_pieces // n_at_once),)](
        x,
        x.stride(0),
        size,
        n_pieces,
        rows.values,
        rows.scales,
        rows.scales.stride(1),
        WIDTH=width,
        PIECES=n_at_once,
        GATED=is_gated,
        num_warps=warps_for(n_at_once * width),
        **overlapping(x),
    )
    return rows


def output_of(rows: Rows) -> tuple[Tensor, int, Tensor, int, Tensor]:
    """Returns where a kernel stores rows by ``store_row``: out, its stride, scales, their group stride, unrounded.

    Args:
        rows: [rows, size], where they are stored.
    """
    if isinstance(rows, Tensor):
        return rows, rows.stride(0), rows, 0, rows
    unrounded = rows.values if rows.unrounded is None else rows.unrounded
    return rows.values, rows.values.stride(0), rows.scales, rows.scales.stride(1), unrounded


def scale_group(rows: Rows, block: int) -> int:
    """Returns the constant ``GROUP`` of such a kernel: values that share a scale, or 0 for rows that are not FP8.

    Args:
        rows: [rows, size], where they are stored.
        block: power of two of at least ``size``: values of a program.
    """
    if isinstance(rows, Tensor):
        return 0
    return block if rows.scales.shape[1] == 1 else BLOCK


def keeps_unrounded(rows: Rows) -> bool:
    """Returns the constant ``KEEPS`` of such a kernel: whether rows in FP8 are also stored as they were before."""
    return not isinstance(rows, Tensor) and rows.unrounded is not None


@CachedKernel
@triton.jit(do_not_specialize=["n_pieces", "group_stride"])
def _quantize(
    x: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    n_pieces: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    group_stride: tl.tensor,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Rounds pieces of rows that have a scale each: whole rows, or ``WIDTH`` values of them."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    n_row_pieces = tl.cdiv(size, WIDTH)
    row, group = (piece // n_row_pieces).to(tl.int64), piece % n_row_pieces
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    is_piece = piece < n_pieces
    is_value = is_piece[:, None] & (column < size)
    source = x + row[:, None] * x_stride + column
    value = tl.load(source, is_value, 0.0).to(tl.float32)
    if GATED:
        value = value / (1.0 + tl.exp(-value)) * tl.load(source + size, is_value, 0.0).to(tl.float32)
    rounded, scale = _rounded(value)
    tl.store(out + row[:, None] * size + column, rounded.to(out.dtype.element_ty), is_value)
    tl.store(scales + row + group * group_stride, scale, is_piece)


@triton.jit
def _rounded(values: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns values in the range of FP8, [groups, values] float32, and the scale of each group."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), _SMALLEST) / _LARGEST
    # NaN stays NaN, so that the check of finite logits sees it.
    rounded = tl.maximum(values / scale[:, None], -_LARGEST, tl.PropagateNan.ALL)
    return tl.minimum(rounded, _LARGEST, tl.PropagateNan.ALL), scale


@triton.jit
def store_row(
    value: tl.tensor,
    row: tl.tensor,
    size: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    scales: tl.tensor,
    group_stride: tl.tensor,
    unrounded: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEPS: tl.constexpr,
) -> None:
    """Stores a row of ``BLOCK`` values, the first ``size`` of which count; in FP8 if ``GROUP`` values have a scale.

    See ``output_of`` for the other arguments. ``GROUP`` is 0 for rows that are not rounded to FP8. With ``KEEPS``
    the row is also stored as it was before, without gaps between rows.
    """
    columns = tl.arange(0, BLOCK)
    if GROUP == 0:
        tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), columns < size)
    else:
        groups, scale = _rounded(tl.reshape(value.to(tl.float32), [BLOCK // GROUP, GROUP]))
        rounded = tl.reshape(groups, [BLOCK]).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + columns, rounded, columns < size)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row + group * group_stride, scale, group * GROUP < size)
        if KEEPS:
            tl.store(unrounded + row * size + columns, value.to(unrounded.dtype.element_ty), columns < size)
