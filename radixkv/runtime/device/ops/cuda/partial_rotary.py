"""The kernel of ``rotary.RotateAndStore`` for heads of which only the leading dimensions are rotated."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8 import to_fp8


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_part_and_store(
    qkv: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    cosine_sine: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    q_out: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    ROTARY_DIM: tl.constexpr,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Each program does one token. A dimension is read with the one that it is rotated with."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    is_rotated = dim < ROTARY_DIM
    other = tl.where(dim < HALF, dim + HALF, tl.where(is_rotated, dim - HALF, dim))
    query = tl.arange(0, HEADS)[:, None]
    key = tl.arange(0, KV_HEADS)[:, None]
    is_query, is_key = query < N_HEADS, key < N_KV_HEADS
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # All loads come before the first use, so that their latencies overlap.
    slot = tl.load(slot_mapping + token).to(tl.int64)
    angles = cosine_sine + tl.load(positions + token).to(tl.int64) * ROTARY_DIM + dim % HALF
    source = qkv + token * qkv_stride
    q = tl.load(source + query * HEAD_DIM + dim, is_query, 0.0)
    q_other = tl.load(source + query * HEAD_DIM + other, is_query, 0.0)
    source += N_HEADS * HEAD_DIM
    k = tl.load(source + key * HEAD_DIM + dim, is_key, 0.0)
    k_other = tl.load(source + key * HEAD_DIM + other, is_key, 0.0)
    v = tl.load(source + (N_KV_HEADS + key) * HEAD_DIM + dim, is_key, 0.0)
    cosine, sine = tl.load(angles, is_rotated, 1.0), tl.load(angles + HALF, is_rotated, 0.0)
    sine = tl.where(dim < HALF, -sine, sine)
    if NORMS:
        q, q_other = _norm_heads(q, q_other, query_norm, dim, other, eps, HEAD_DIM, ADDS_ONE)
        k, k_other = _norm_heads(k, k_other, key_norm, dim, other, eps, HEAD_DIM, ADDS_ONE)
    dtype = q.dtype
    q = (q.to(tl.float32) * cosine + q_other.to(tl.float32) * sine).to(dtype)
    k = (k.to(tl.float32) * cosine + k_other.to(tl.float32) * sine).to(dtype)
    tl.store(q_out + token * (N_HEADS * HEAD_DIM) + query * HEAD_DIM + dim, q, is_query)
    is_stored = is_key & (slot >= 0)
    if LARGEST is not None:
        k, v = to_fp8(k, k_scale, LARGEST), to_fp8(v, v_scale, LARGEST)
    place = slot * (N_KV_HEADS * HEAD_DIM) + key * HEAD_DIM + dim
    tl.store(k_cache + place, k, is_stored)
    tl.store(v_cache + place, v, is_stored)


@triton.jit
def _norm_heads(
    x: tl.tensor,
    other_x: tl.tensor,
    weight: tl.tensor,
    dim: tl.tensor,
    other: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> tl.tensor:
    """Applies the RMS norm to heads, [heads, HEAD_DIM], and to their dimensions in another order."""
    dtype = x.dtype
    x, other_x = x.to(tl.float32), other_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    x_weight, other_weight = tl.load(weight + dim), tl.load(weight + other)
    rounded = x_weight.dtype
    x_weight, other_weight = x_weight.to(tl.float32), other_weight.to(tl.float32)
    # As Transformers does: Gemma's norms are not rounded before the weight, others are, but where it is float32.
    if ADDS_ONE:
        x, other_x = x * scale * (1.0 + x_weight), other_x * scale * (1.0 + other_weight)
    else:
        x = (x * scale).to(rounded).to(tl.float32) * x_weight
        other_x = (other_x * scale).to(rounded).to(tl.float32) * other_weight
    return x.to(dtype), other_x.to(dtype)
