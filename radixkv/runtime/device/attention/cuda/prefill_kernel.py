"""The Triton kernel of prompt attention, over tiles of consecutive tokens of one prompt.

Each thread block computes the heads of one KV head for a tile of tokens, with the online softmax of
FlashAttention-2 (https://arxiv.org/abs/2307.08691). It reads no key that all its tokens mask. A tile is never split
over its keys: where a step has few tokens after a long context, few blocks run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.attention.cuda.base import LayerTensors
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8 import split_e4m3
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

N_PROMPT_COLUMNS = 4
"""Values per item of ``attend_prompts``: first token, number of tokens, first entry, end."""

_LOG2_E = 1.4426950408889634


class PrefillTile(NamedTuple):
    """Tile size and launch parameters of a thread block of ``attend_prompts``."""

    n_pairs: int
    """(Token, head) pairs of one KV head."""
    n_keys: int
    """Positions of K and V per loop iteration."""
    n_stages: int
    """K and V of ``n_stages`` - 1 iterations are in flight."""
    n_warps: int


def attend_prompts(
    layer: LayerTensors, *, tables: Tensor, items: Tensor, window: int | None, scale: float, tile: PrefillTile
) -> None:
    """Enqueues items, each of consecutive tokens that are the last positions which the item reads.

    The first items start first. The result of a token does not depend on other items.

    Args:
        layer: of prompt rows; queries in bfloat16 or float16, contiguous within a token. K and V have their dtype
            or 8 bits. Numbers of 8 bits, and the queries that they are multiplied with, are converted to float16.
        tables: int32 block tables, contiguous.
        items: [items, ``N_PROMPT_COLUMNS``] int32, contiguous: index of the item's first token, number of tokens,
            index of its block table's first entry in ``tables``, and the position after the last token.
        window: positions that a token attends to, its own included; None for all.
        scale: multiplier of the scores.
        tile: an item has at most ``n_pairs`` // (heads of a KV head) tokens.
    """
    q, k_cache, v_cache, out, scales, sinks = layer
    n_heads, head_dim = q.shape[1:]
    page_size, n_kv_heads = k_cache.shape[1:3]
    has_pairs = k_cache.dtype != q.dtype
    if has_pairs:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    _attend_prompts[(len(items) * n_kv_heads,)](
        q,
        k_cache,
        v_cache,
        tables,
        items,
        out,
        out if sinks is None else sinks,
        scale * scales.k * _LOG2_E,
        scales.v,
        q.stride(0),
        k_cache.stride(0),
        COLUMNS=N_PROMPT_COLUMNS,
        GROUP=n_heads // n_kv_heads,
        KV_HEADS=n_kv_heads,
        DIM=head_dim,
        PAGE=page_size,
        TOKEN_STRIDE=k_cache.stride(1),
        WINDOW=0 if window is None else window,
        PAIRS=tile.n_pairs,
        KEYS=tile.n_keys,
        STAGES=tile.n_stages,
        HAS_WORDS=has_pairs,
        USES_PTX=q.is_cuda,
        HAS_SINKS=sinks is not None,
        num_warps=tile.n_warps,
        **overlapping(q),
    )


@CachedKernel
@triton.jit
def _attend_prompts(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    q_stride: tl.tensor,
    page_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    USES_PTX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Items are written by a copy, which no kernel overlaps: they may be read before the wait.
    kv_head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * COLUMNS
    first_token = tl.load(item)
    n_tokens = tl.load(item + 1)
    entries = tables + tl.load(item + 2)
    end = tl.load(item + 3)
    pair = tl.arange(0, PAIRS)
    token = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    is_pair = token < n_tokens
    # Pairs beyond the item's tokens compute with the last one's mask, and are not stored.
    position = end - n_tokens + tl.minimum(token, n_tokens - 1)
    row = (first_token + token).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    n_words: tl.constexpr = DIM // 2 if HAS_WORDS else DIM
    word = tl.arange(0, n_words)
    queries = q + row[:, None] * q_stride + head[:, None] * DIM
    if HAS_WORDS:
        even_queries = tl.load(queries + 2 * word[None, :], is_pair[:, None], 0.0).to(tl.float16)
        odd_queries = tl.load(queries + 2 * word[None, :] + 1, is_pair[:, None], 0.0).to(tl.float16)
    else:
        even_queries = tl.load(queries + word[None, :], is_pair[:, None], 0.0)
        odd_queries = even_queries
    summed = tl.zeros([PAIRS, n_words], tl.float32)
    odd_summed = summed
    highest = tl.full([PAIRS], -1e38, tl.float32)  # finite: a pair may see none of the keys of its first iterations
    total = tl.zeros([PAIRS], tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(end - n_tokens + 1 - WINDOW, 0)
        middle = first
    else:  # all tokens see the keys up to the first token's position
        middle = (end - n_tokens + 1) // KEYS * KEYS
        summed, odd_summed, highest, total = _attend_keys(
            even_queries,
            odd_queries,
            k_cache,
            v_cache,
            entries,
            kv_head,
            position,
            first,
            middle,
            end,
            page_stride,
            scale,
            summed,
            odd_summed,
            highest,
            total,
            PAGE,
            TOKEN_STRIDE,
            WINDOW,
            KEYS,
            STAGES,
            HAS_WORDS,
            USES_PTX,
            False,
        )
    summed, odd_summed, highest, total = _attend_keys(
        even_queries,
        odd_queries,
        k_cache,
        v_cache,
        entries,
        kv_head,
        position,
        middle,
        end,
        end,
        page_stride,
        scale,
        summed,
        odd_summed,
        highest,
        total,
        PAGE,
        TOKEN_STRIDE,
        WINDOW,
        KEYS,
        STAGES,
        HAS_WORDS,
        USES_PTX,
        True,
    )
    if HAS_WORDS:
        summed = tl.interleave(summed, odd_summed)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) - highest)
    attended = summed * (value_scale / total)[:, None]
    target = row[:, None] * (GROUP * KV_HEADS * DIM) + head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + target, attended.to(out.dtype.element_ty), is_pair[:, None])


@triton.jit
def _attend_keys(
    even_queries: tl.tensor,
    odd_queries: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    entries: tl.tensor,
    kv_head: tl.tensor,
    position: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    summed: tl.tensor,
    odd_summed: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    USES_PTX: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds the keys from ``begin`` to ``stop`` to the sums of the softmax. No page from ``end`` on is read.

    Page ids are loaded one iteration ahead, so that K and V are loaded while earlier ones are multiplied.
    """
    n_words: tl.constexpr = even_queries.shape[1]
    word = tl.arange(0, n_words)
    first_key = begin + tl.arange(0, KEYS)
    page = tl.load(entries + first_key // PAGE, first_key < end, 0)
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        key_position = start + tl.arange(0, KEYS)
        offset = page.to(tl.int64) * page_stride + (key_position % PAGE) * TOKEN_STRIDE + kv_head * n_words
        offsets = offset[:, None] + word[None, :]
        is_key = (key_position < end)[:, None]
        key = tl.load(k_cache + offsets, is_key, 0) if IS_MASKED else tl.load(k_cache + offsets)
        if HAS_WORDS:
            key, odd_key = split_e4m3(key, USES_PTX)
        score = tl.dot(even_queries, tl.trans(key))
        if HAS_WORDS:
            score = tl.dot(odd_queries, tl.trans(odd_key), score)
        score *= scale
        if IS_MASKED:
            is_seen = key_position[None, :] <= position[:, None]
            if WINDOW:
                is_seen &= key_position[None, :] > position[:, None] - WINDOW
            score = tl.where(is_seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        rescale = tl.exp2(highest - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * rescale + tl.sum(weight, 1)
        highest = higher
        value = tl.load(v_cache + offsets, is_key, 0) if IS_MASKED else tl.load(v_cache + offsets)
        if HAS_WORDS:
            value, odd_value = split_e4m3(value, USES_PTX)
            odd_summed = tl.dot(weight.to(odd_value.dtype), odd_value, odd_summed * rescale[:, None])
        summed = tl.dot(weight.to(value.dtype), value, summed * rescale[:, None])
        key_position += KEYS
        page = tl.load(entries + key_position // PAGE, key_position < end, 0)
    return summed, odd_summed, highest, total
