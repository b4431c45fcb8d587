"""The end of a mixture of experts: each token's weighted sum of its experts' outputs, alone or added and normed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import RmsFields, Rows
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8_rows import keeps_unrounded, output_of, scale_group, store_row
from radixkv.runtime.device.ops.cuda.norm import normed_row
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def sum_experts(
    products: Tensor,
    expert_weights: Tensor,
    out: Rows,
    residual: Tensor | None = None,
    norm: RmsFields | None = None,
) -> None:
    """Computes each token's sum of ``products``, weighted, in the order of the experts.

    It is summed in float32 and rounded once. With a residual stream and a norm it computes ``residual += sum`` and
    norms that, with the bits of ``rms_norm``.

    Args:
        products: [tokens * active, hidden], contiguous.
        expert_weights: [tokens, active], contiguous.
        out: [tokens, hidden]; a contiguous tensor without a norm.
        residual: [tokens, hidden], contiguous; with a norm only.
        norm: of the sum; see ``rms_norm``.
    """
    n_tokens, n_active = expert_weights.shape
    size = products.shape[1]
    block = power_of_two(size)
    _sum_experts[(n_tokens,)](
        products,
        expert_weights,
        products if residual is None else residual,
        products if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        *output_of(out),
        GROUP=scale_group(out, block),
        KEEPS=keeps_unrounded(out),
        SIZE=size,
        BLOCK=block,
        N_ACTIVE=n_active,
        NORMS=norm is not None,
        ADDS_ONE=norm is not None and norm.adds_one,
        num_warps=warps_for(block),
        **overlapping(products),
    )


@CachedKernel
@triton.jit(do_not_specialize=["group_stride"])
def _sum_experts(
    products: tl.tensor,
    expert_weights: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
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
    N_ACTIVE: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    if NORMS:
        scale = tl.load(norm_weight + columns, is_column, 0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(N_ACTIVE):
        pair = token * N_ACTIVE + rank
        product = tl.load(products + pair * SIZE + columns, is_column, 0.0)
        total += product.to(tl.float32) * tl.load(expert_weights + pair).to(tl.float32)
    value = total.to(products.dtype.element_ty)
    if NORMS:
        target = residual + token * SIZE + columns
        value = (value.to(tl.float32) + tl.load(target, is_column, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(target, value, is_column)
        value = normed_row(value, scale, eps, SIZE, ADDS_ONE)
    store_row(value, token, SIZE, out, out_stride, scales, group_stride, unrounded, BLOCK, GROUP, KEEPS)
