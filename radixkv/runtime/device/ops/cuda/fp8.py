"""Conversion to and from 8-bit floats (e4m3)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8_MAX
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_BLOCK = 4096


def round_to_fp8(x: Tensor, out: Tensor) -> None:
    """Rounds ``x`` into ``out``, as ``kv_dtype.quantize`` does with a scale of 1.

    Args:
        x: contiguous, bfloat16, float16 or float32.
        out: contiguous, of the same shape, ``float8_e4m3fn``.
    """
    size = x.numel()
    _round_to_fp8[(-(-size // _BLOCK),)](x, out, size, LARGEST=FP8_MAX, BLOCK=_BLOCK, num_warps=8, **overlapping(x))


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Rounds ``x / scale`` to 8 bits, at most ``LARGEST`` in magnitude. What is not finite becomes NaN."""
    scaled = tl.div_rn(x.to(tl.float32), scale)
    limited = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    return tl.where(tl.abs(scaled) < float("inf"), limited, float("nan")).to(tl.float8e4nv)


@CachedKernel
@triton.jit
def _round_to_fp8(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, LARGEST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = offsets < size
    values = tl.load(x + offsets, is_value, 0.0)
    tl.store(out + offsets, to_fp8(values, 1.0, LARGEST), is_value)


@triton.jit
def split_e4m3(words: tl.tensor, USES_PTX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the first and the second of the two e4m3 numbers of each word, as float16.

    V is loaded in words because tensor cores need its values in another order than memory has them. One instruction
    (``ldmatrix``) rearranges 16-bit words, and none rearranges bytes. After it a word's two numbers are converted.
    """
    if USES_PTX:
        first_numbers, second_numbers = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 one, other;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 one, first;
            cvt.rn.f16x2.e4m3x2 other, second;
            prmt.b32 $0, one, other, 0x5410;
            prmt.b32 $1, one, other, 0x7632;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return first_numbers, second_numbers
    return _from_e4m3(words & 0xFF), _from_e4m3((words >> 8) & 0xFF)


@triton.jit
def _from_e4m3(bits: tl.tensor) -> tl.tensor:
    """Returns numbers whose e4m3 bits are given, as float16, without instructions for FP8."""
    number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
