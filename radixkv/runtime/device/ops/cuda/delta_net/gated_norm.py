"""The norm of a gated delta net's output, and its gate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for

_VALUES = 2048
"""Values per program, at least those of a head."""


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Computes ``out = x / rms(x) * weight * silu(gate)`` by heads, in float32.

    The quotient, its product with the weight, and the result are rounded, as in Transformers.

    Args:
        x: [tokens, heads, size], contiguous; a power of two of values.
        gate: [tokens, heads * size], of the same dtype; rows may be strided.
        weight: [size].
        eps: is added to the mean square.
        out: [tokens, heads * size], contiguous; may be the memory of ``x``.
    """
    n_tokens, n_heads, size = x.shape
    heads = min(max(_VALUES // size, 1), power_of_two(n_heads))
    _gated_norm[n_tokens, -(-n_heads // heads)](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        N_HEADS=n_heads,
        HEADS=heads,
        SIZE=size,
        num_warps=warps_for(heads * size),
        **overlapping(x),
    )


@CachedKernel
@triton.jit
def _gated_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    is_head = head < N_HEADS
    scale = tl.load(weight + column)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    place = head * SIZE + column
    value = tl.load(x + token * (N_HEADS * SIZE) + place, is_head, 0.0).to(tl.float32)
    factor = tl.load(gate + token * gate_stride + place, is_head, 0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    normed = value * tl.rsqrt(tl.sum(value * value, 1)[:, None] / SIZE + eps)
    normed = (normed.to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype).to(tl.float32)
    gated = normed * (factor / (1.0 + tl.exp(-factor)))
    tl.store(out + token * (N_HEADS * SIZE) + place, gated.to(dtype), is_head)
