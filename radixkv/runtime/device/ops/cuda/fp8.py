"""Rounding to 8-bit floats (e4m3)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8_MAX
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_BLOCK = 4096


def round_to_fp8(x: Tensor, out: Tensor) -> None:
    """Rounds ``x`` into ``out``, as ``kv_dtype.quantize`` does with a scale of 1.

    Args:
        x: contiguous, bfloat16, float16 or float32.
        out: contiguous, of the same shape, ``float8_e4m3fn``.
    """
    size = x.numel()
    _round_to_fp8[(triton.cdiv(size, _BLOCK),)](
        x, out, size, LARGEST=FP8_MAX, BLOCK=_BLOCK, num_warps=8, **overlapping(x)
    )


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Rounds ``x / scale`` to 8 bits, at most ``LARGEST`` in magnitude. What is not finite becomes NaN."""
    scaled = tl.div_rn(x.to(tl.float32), scale)
    limited = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    return tl.where(tl.abs(scaled) < float("inf"), limited, float("nan")).to(tl.float8e4nv)


@triton.jit
def _round_to_fp8(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, LARGEST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = offsets < size
    values = tl.load(x + offsets, is_value, 0.0)
    tl.store(out + offsets, to_fp8(values, 1.0, LARGEST), is_value)
