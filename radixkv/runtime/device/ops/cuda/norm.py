"""The RMS norm kernel, with or without a preceding residual addition."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import RmsFields, Rows
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8_rows import keeps_unrounded, output_of, scale_group, store_row
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def rms_norm(x: Tensor, norm: RmsFields, out: Rows, residual: Tensor | None = None) -> None:
    """Computes ``out = x / rms(x) * weight`` by rows, in float32; rounded to the weight's dtype before it too.

    With a residual stream it computes ``residual += x`` first, rounded to its dtype, and norms that.

    Args:
        x: [rows, hidden] bfloat16, float16 or float32; rows may be strided.
        norm: with a weight [hidden] of the dtype of ``x``, or in float32.
        out: [rows, hidden]: of the dtype of ``x``, also ``x`` itself; or FP8, with the bits of ``quantize_rows``.
        residual: of the shape and dtype of ``x``.
    """
    n_rows, size = x.shape
    block = power_of_two(size)
    target = x if residual is None else residual
    _norm[(n_rows,)](
        x,
        target,
        norm.weight,
        x.stride(0),
        target.stride(0),
        norm.eps,
        *output_of(out),
        GROUP=scale_group(out, block),
        KEEPS=keeps_unrounded(out),
        SIZE=size,
        BLOCK=block,
        ADDS=residual is not None,
        ADDS_ONE=norm.adds_one,
        num_warps=warps_for(block),
        **overlapping(x),
    )


@CachedKernel
@triton.jit(do_not_specialize=["group_stride"])
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    scales: tl.tensor,
    group_stride: tl.tensor,
    unrounded: tl.tensor,
    GROUP: tl.constexpr,
    KEEPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    scale = tl.load(weight + columns, is_column, 0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + columns, is_column, 0.0)
    if ADDS:
        target = residual + row * residual_stride + columns
        value = (value.to(tl.float32) + tl.load(target, is_column, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(target, value, is_column)
    normed = normed_row(value, scale, eps, SIZE, ADDS_ONE)
    store_row(normed, row, SIZE, out, out_stride, scales, group_stride, unrounded, BLOCK, GROUP, KEEPS)


@triton.jit
def normed_row(
    value: tl.tensor, scale: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, ADDS_ONE: tl.constexpr
) -> tl.tensor:
    """Returns ``rms_norm`` of a row, padded with zeros, in its dtype. ``scale`` is the norm's weight."""
    full = value.to(tl.float32)
    normed = full * tl.rsqrt(tl.sum(full * full, 0) / SIZE + eps)
    # As Transformers does: Gemma's norms are not rounded before the weight, others are, but where it is float32.
    if ADDS_ONE:
        scaled = normed * (1.0 + scale.to(tl.float32))
    else:
        scaled = normed.to(scale.dtype).to(tl.float32) * scale.to(tl.float32)
    return scaled.to(value.dtype)
