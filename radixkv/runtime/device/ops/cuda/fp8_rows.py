"""Kernels that round activations to FP8 (e4m3) with a scale for each token, or for each 128 values of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for
from radixkv.runtime.device.weights.fp8_matrix import BLOCK

_ROW_UNIT = 4
_SMALLEST = tl.constexpr(1e-10)
"""The least maximum that a scale is computed from, so that zeros have a scale."""


@dataclass(frozen=True)
class Fp8Rows:
    """Rounded activations: ``values * scales``."""

    n_rows: int
    values: Tensor
    """[rows, size] e4m3. With groups further rows make their number a multiple of 4, as cuBLAS wants it."""
    scales: Tensor
    """float32: [rows, 1], or [rows, ceil(size / 128)] stored by columns, with as many rows as ``values``."""


def quantize_rows(x: Tensor, *, by_group: bool) -> Fp8Rows:
    """Rounds rows to FP8, each scaled so that its largest value, or that of each 128 values, becomes 448.

    Args:
        x: [rows, size] bfloat16, float16 or float32; rows may be strided.
        by_group: whether each 128 values have a scale; otherwise each row has one.
    """
    return _launch(x, x.shape[1], by_group=by_group, is_gated=False)


def silu_and_multiply_to_fp8(gate_up: Tensor, *, by_group: bool) -> Fp8Rows:
    """Computes ``silu(gate) * up`` in float32, and rounds it as ``quantize_rows`` does.

    Args:
        gate_up: [rows, 2 * inner], gate first; bfloat16, float16 or float32; rows may be strided.
        by_group: as of ``quantize_rows``.
    """
    return _launch(gate_up, gate_up.shape[1] // 2, by_group=by_group, is_gated=True)


def _launch(x: Tensor, size: int, *, by_group: bool, is_gated: bool) -> Fp8Rows:
    n_rows = len(x)
    n_groups, n_padded = (-(-size // BLOCK), -(-n_rows // _ROW_UNIT) * _ROW_UNIT) if by_group else (1, n_rows)
    rows = Fp8Rows(
        n_rows,
        torch.empty(n_padded, size, dtype=FP8, device=x.device),
        torch.empty(n_groups, n_padded, dtype=torch.float32, device=x.device).t(),
    )
    block = power_of_two(max(size, BLOCK))
    _quantize[(n_rows,)](
        x,
        rows.values,
        rows.scales,
        x.stride(0),
        rows.scales.stride(1),
        size,
        LARGEST=FP8_MAX,
        BLOCK=block,
        GROUP=BLOCK if by_group else block,
        GATED=is_gated,
        num_warps=warps_for(block),
        **overlapping(x),
    )
    return rows


@triton.jit
def _quantize(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    group_stride: tl.tensor,
    size: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    source = x + row * x_stride + columns
    value = tl.load(source, is_column, 0.0).to(tl.float32)
    if GATED:
        value = value / (1.0 + tl.exp(-value)) * tl.load(source + size, is_column, 0.0).to(tl.float32)
    groups = tl.reshape(value, [BLOCK // GROUP, GROUP])
    scale = tl.maximum(tl.max(tl.abs(groups), 1), _SMALLEST) / LARGEST
    rounded = tl.reshape(groups / scale[:, None], [BLOCK])
    # NaN stays NaN, so that the check of finite logits sees it.
    rounded = tl.maximum(rounded, -LARGEST, tl.PropagateNan.ALL)
    rounded = tl.minimum(rounded, LARGEST, tl.PropagateNan.ALL)
    tl.store(values + row * size + columns, rounded.to(values.dtype.element_ty), is_column)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales + row + group * group_stride, scale, group * GROUP < size)
