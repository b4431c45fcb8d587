"""The gate of a Mamba2 layer's output, and the norm of its groups."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, n_groups: int, out: Tensor) -> None:
    """Computes ``y = x * silu(gate)``, and ``out = y / rms(y) * weight`` by groups, in float32.

    The quotient, and its product with the weight, are rounded, as in Transformers.

    Args:
        x: [tokens, size], contiguous.
        gate: [tokens, size], of the same dtype; rows may be strided.
        weight: [size].
        eps: is added to the mean square.
        n_groups: divides ``size`` into groups.
        out: [tokens, size], contiguous; may be the memory of ``x``.
    """
    n_tokens, size = x.shape
    block = power_of_two(size // n_groups)
    _gated_group_norm[n_tokens, n_groups](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        SIZE=size,
        GROUP=size // n_groups,
        BLOCK=block,
        num_warps=warps_for(block),
        **overlapping(x),
    )


@CachedKernel
@triton.jit
def _gated_group_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < GROUP
    place = tl.program_id(1) * GROUP + column
    scale = tl.load(weight + place, is_column, 0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + token * SIZE + place, is_column, 0.0).to(tl.float32)
    factor = tl.load(gate + token * gate_stride + place, is_column, 0.0).to(tl.float32)
    gated = value * (factor / (1.0 + tl.exp(-factor)))
    dtype = out.dtype.element_ty
    normed = gated * tl.rsqrt(tl.sum(gated * gated, 0) / GROUP + eps)
    normed = normed.to(dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + token * SIZE + place, normed.to(dtype), is_column)
