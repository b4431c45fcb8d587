"""Between the QKV product and attention: head norms, rotary embedding, and the write into the K/V pool, in one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cosine_sine: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_out: Tensor,
    *,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """Turns queries and keys (half-split rotary); keys and values go to the pool, queries to ``q_out``.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; rows may be strided. bfloat16, float16 or float32.
        positions: [tokens] int32, rows of ``cosine_sine``.
        lines: [tokens] int32, lines of the pool; -1: the token is not written.
        cosine_sine: [positions, head_dim] float32, cosines in the first half, sines in the second.
        k_cache, v_cache: contiguous, seen as [lines, kv_heads, head_dim], of ``qkv``'s dtype.
        q_out: [tokens, heads, head_dim], contiguous, of ``qkv``'s dtype.
        query_norm, key_norm: [head_dim], weights of an RMS norm over each head before it is turned; both or none.
        eps: of these norms.
    """
    n_tokens, n_heads, head_dim = q_out.shape
    n_kv_heads = (qkv.shape[1] // head_dim - n_heads) // 2
    norms = query_norm is not None and key_norm is not None
    heads = power_of_two(n_heads)
    _rotate_and_store[(n_tokens,)](
        qkv,
        positions,
        slot_mapping,
        cosine_sine,
        k_cache,
        v_cache,
        q_out,
        query_norm if norms else qkv,
        key_norm if norms else qkv,
        qkv.stride(0),
        eps,
        N_HEADS=n_heads,
        N_KV_HEADS=n_kv_heads,
        HEADS=heads,
        KV_HEADS=power_of_two(n_kv_heads),
        HEAD_DIM=head_dim,
        NORMS=norms,
        num_warps=warps_for(heads * head_dim, per_thread=32),
        **overlapping(qkv),
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_store(
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
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    query = tl.arange(0, HEADS)[:, None]
    key = tl.arange(0, KV_HEADS)[:, None]
    is_query, is_key = query < N_HEADS, key < N_KV_HEADS
    of_query = query * HEAD_DIM + dims
    of_key = key * HEAD_DIM + dims
    of_value = key * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    # All loads come before the first use, so that they wait together.
    slot = tl.load(slot_mapping + token).to(tl.int64)
    angles = cosine_sine + tl.load(positions + token).to(tl.int64) * HEAD_DIM + dims
    source = qkv + token * qkv_stride
    q_first = tl.load(source + of_query, is_query, 0.0)
    q_second = tl.load(source + of_query + HALF, is_query, 0.0)
    source += N_HEADS * HEAD_DIM
    k_first = tl.load(source + of_key, is_key, 0.0)
    k_second = tl.load(source + of_key + HALF, is_key, 0.0)
    v = tl.load(source + N_KV_HEADS * HEAD_DIM + of_value, is_key, 0.0)
    cosine, sine = tl.load(angles), tl.load(angles + HALF)
    if NORMS:
        q_first, q_second = _normed(q_first, q_second, query_norm, eps, HALF)
        k_first, k_second = _normed(k_first, k_second, key_norm, eps, HALF)

    q_first, q_second = _turned(q_first, q_second, cosine, sine)
    target = q_out + token * (N_HEADS * HEAD_DIM) + of_query
    tl.store(target, q_first, is_query)
    tl.store(target + HALF, q_second, is_query)

    k_first, k_second = _turned(k_first, k_second, cosine, sine)
    place = slot * (N_KV_HEADS * HEAD_DIM)
    is_stored = is_key & (slot >= 0)
    tl.store(k_cache + place + of_key, k_first, is_stored)
    tl.store(k_cache + place + of_key + HALF, k_second, is_stored)
    tl.store(v_cache + place + of_value, v, is_stored)


@triton.jit
def _normed(
    first: tl.tensor, second: tl.tensor, weight: tl.tensor, eps: tl.tensor, HALF: tl.constexpr
) -> tl.tensor:
    """Heads over their root mean square times the weight, [heads, HALF] twice."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
    weight += tl.arange(0, HALF)[None, :]
    # Rounded before the weight, as Transformers does.
    first = (first * scale).to(dtype).to(tl.float32) * tl.load(weight).to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * tl.load(weight + HALF).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def _turned(first: tl.tensor, second: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> tl.tensor:
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cosine - second * sine).to(dtype), (second * cosine + first * sine).to(dtype)
