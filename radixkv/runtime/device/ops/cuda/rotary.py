"""The fused kernel between QKV projection and attention: head norms, rotary embedding and the KV write."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8_MAX, UNSCALED, LayerScales
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8 import to_fp8
from radixkv.runtime.device.ops.cuda.partial_rotary import rotate_part_and_store
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


@dataclass(frozen=True)
class RotateAndStore:
    """Norms and rotates heads (half-split rotary), and writes K and V into the pool, in one kernel."""

    cosine_sine: Tensor | None
    """[positions, rotated dimensions] float32, cosines in the first half, sines in the second. The dimensions after
    these are not rotated; None: none is."""
    query_norm: Tensor | None
    """[head_dim], as is ``key_norm``: weights of an RMS norm over each head before rotation; both or neither, but
    that a layer without own keys has none for these. What they multiply is rounded to their dtype before."""
    key_norm: Tensor | None
    eps: float
    """Added to the mean squares of these norms."""
    adds_one: bool = False
    """Whether the norms multiply by ``1 + weight``, and round only after that."""
    scales: LayerScales = UNSCALED
    """By which K and V are divided before they are rounded to 8 bits; of no effect otherwise."""
    has_values: bool = True
    """Whether values have a projection; if not, they are what that of the keys gives."""
    has_value_norm: bool = False
    """Whether values have an RMS norm over each head, without a weight."""

    def __call__(self, qkv: Tensor, inputs: TokenInputs, k_cache: Tensor, v_cache: Tensor, q_out: Tensor) -> None:
        """See ``ops.base.RotateAndStore``.

        Args:
            qkv: rows may be strided. bfloat16, float16 or float32.
            inputs: the tokens; positions are rows of ``cosine_sine``.
            k_cache, v_cache: [pages, page_size, kv_heads, head_dim], contiguous, of the dtype of ``qkv`` or
                ``float8_e4m3fn``.
            q_out: contiguous, of the dtype of ``qkv``.
        """
        n_tokens, n_heads, head_dim = q_out.shape
        n_kv_heads = (qkv.shape[1] // head_dim - n_heads) // (2 if self.has_values else 1)
        heads, angles = power_of_two(n_heads), self.cosine_sine
        constants: dict[str, int]
        if angles is None or angles.shape[1] == head_dim:
            kernel = _rotate_and_store
            constants = {"VALUES": self.has_values, "NORMS_VALUES": self.has_value_norm}
            constants["ROTATES"] = angles is not None
        else:
            kernel = rotate_part_and_store
            constants = {"ROTARY_DIM": angles.shape[1]}
            is_supported = n_kv_heads and self.has_values and not self.has_value_norm
            assert is_supported, "other models"
        kernel[(n_tokens,)](
            qkv,
            inputs.positions,
            inputs.slot_mapping,
            qkv if angles is None else angles,
            k_cache,
            v_cache,
            q_out,
            qkv if self.query_norm is None else self.query_norm,
            qkv if self.key_norm is None else self.key_norm,
            qkv.stride(0),
            self.eps,
            self.scales.k,
            self.scales.v,
            **constants,
            N_HEADS=n_heads,
            N_KV_HEADS=n_kv_heads,
            HEADS=heads,
            KV_HEADS=power_of_two(max(n_kv_heads, 1)),
            HEAD_DIM=head_dim,
            NORMS=self.query_norm is not None,
            ADDS_ONE=self.adds_one,
            LARGEST=None if k_cache.dtype == qkv.dtype else FP8_MAX,
            num_warps=warps_for(heads * head_dim, per_thread=32),
            **overlapping(qkv),
        )


@CachedKernel
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
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    VALUES: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    ROTATES: tl.constexpr,
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
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    query = tl.arange(0, HEADS)[:, None]
    key = tl.arange(0, KV_HEADS)[:, None]
    is_query, is_key = query < N_HEADS, key < N_KV_HEADS
    query_offsets = query * HEAD_DIM + dims
    key_offsets = key * HEAD_DIM + dims
    value_offsets = key * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # All loads come before the first use, so that their latencies overlap.
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if ROTATES:
        angles = cosine_sine + tl.load(positions + token).to(tl.int64) * HEAD_DIM + dims
    source = qkv + token * qkv_stride
    q_first = tl.load(source + query_offsets, is_query, 0.0)
    q_second = tl.load(source + query_offsets + HALF, is_query, 0.0)
    if N_KV_HEADS > 0:
        source += N_HEADS * HEAD_DIM
        k_first = tl.load(source + key_offsets, is_key, 0.0)
        k_second = tl.load(source + key_offsets + HALF, is_key, 0.0)
        v = tl.load(source + (N_KV_HEADS * HEAD_DIM if VALUES else 0) + value_offsets, is_key, 0.0)
    if ROTATES:
        cosine, sine = tl.load(angles), tl.load(angles + HALF)
    if NORMS:
        q_first, q_second = _norm_heads(q_first, q_second, query_norm, eps, HALF, ADDS_ONE)

    if ROTATES:
        q_first, q_second = _rotate(q_first, q_second, cosine, sine)
    target = q_out + token * (N_HEADS * HEAD_DIM) + query_offsets
    tl.store(target, q_first, is_query)
    tl.store(target + HALF, q_second, is_query)

    if N_KV_HEADS > 0:
        if NORMS:
            k_first, k_second = _norm_heads(k_first, k_second, key_norm, eps, HALF, ADDS_ONE)
        if ROTATES:
            k_first, k_second = _rotate(k_first, k_second, cosine, sine)
        if NORMS_VALUES:
            full = v.to(tl.float32)
            v = (full * tl.rsqrt(tl.sum(full * full, 1) / HEAD_DIM + eps)[:, None]).to(v.dtype)
        pool_offset = slot * (N_KV_HEADS * HEAD_DIM)
        is_stored = is_key & (slot >= 0)
        if LARGEST is not None:
            k_first, k_second = to_fp8(k_first, k_scale, LARGEST), to_fp8(k_second, k_scale, LARGEST)
            v = to_fp8(v, v_scale, LARGEST)
        tl.store(k_cache + pool_offset + key_offsets, k_first, is_stored)
        tl.store(k_cache + pool_offset + key_offsets + HALF, k_second, is_stored)
        tl.store(v_cache + pool_offset + value_offsets, v, is_stored)


@triton.jit
def _norm_heads(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    ADDS_ONE: tl.constexpr,
) -> tl.tensor:
    """Applies the RMS norm to heads given as two halves, [heads, HALF] each."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
    weight += tl.arange(0, HALF)[None, :]
    first_weight, second_weight = tl.load(weight), tl.load(weight + HALF)
    rounded = first_weight.dtype
    first_weight, second_weight = first_weight.to(tl.float32), second_weight.to(tl.float32)
    # As Transformers does: Gemma's norms are not rounded before the weight, others are, but where it is float32.
    if ADDS_ONE:
        first, second = first * scale * (1.0 + first_weight), second * scale * (1.0 + second_weight)
    else:
        first = (first * scale).to(rounded).to(tl.float32) * first_weight
        second = (second * scale).to(rounded).to(tl.float32) * second_weight
    return first.to(dtype), second.to(dtype)


@triton.jit
def _rotate(first: tl.tensor, second: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> tl.tensor:
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cosine - second * sine).to(dtype), (second * cosine + first * sine).to(dtype)
