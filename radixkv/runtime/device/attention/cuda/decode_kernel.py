"""The Triton kernel of decode attention, over work items of few queries each.

On an H200 with 256 rows, FlashInfer's FA2 kernel reads 3.2 TB/s at 320 tokens per row and 4.1 TB/s at 1,024; this
kernel reads 4.0 and 4.3. Its thread blocks are small, so that several on each multiprocessor hide the latency of
loading page ids and first tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.attention.cuda.base import LayerTensors
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig
from radixkv.runtime.device.attention.cuda.merge import PartialResults
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8 import split_e4m3
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_LOG2_E = 1.4426950408889634


def attend_decode(
    layer: LayerTensors,
    tables: Tensor,
    items: Tensor,
    order: Tensor,
    results: PartialResults,
    *,
    scale: float,
    n_items: int,
    tile: int,
    tile_config: TileConfig,
    has_limits: bool = False,
) -> None:
    """Enqueues work items.

    Args:
        layer: of decode rows, whose outputs are written if a row has a single item; V's scale and the sinks are
            applied to these. K and V have the dtype of the queries or 8 bits.
        tables: [batch slots, width] int32 block tables, contiguous.
        items: [``work_items.N_COLUMNS``, capacity] int32.
        order: [rows] int32: the row of each query.
        results: where other items write; not multiplied by V's scale, and without sinks.
        scale: multiplier of the scores.
        n_items: items to launch, padding included.
        tile: most (query, head) pairs of an item: 16, 32 or 64.
        tile_config: from ``decode_tiles.choose_tile_config``.
        has_limits: whether queries attend only to the positions below their items' limits. Otherwise they attend to
            all that their items read.
    """
    q, k_cache, v_cache, out, scales, sinks = layer
    n_heads, head_dim = q.shape[1:]
    n_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    has_pairs = k_cache.dtype != q.dtype
    if has_pairs:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    _attend_decode[n_kv_heads, n_items](  # all heads of the first items, which are the longest, start first
        q,
        k_cache,
        v_cache,
        tables,
        items,
        order,
        out,
        results.values,
        results.lse,
        results.lse if sinks is None else sinks,
        scale * scales.k * _LOG2_E,
        scales.v,
        items.stride(0),
        q.stride(0),
        k_cache.stride(0),
        GROUP=n_heads // n_kv_heads,
        KV_HEADS=n_kv_heads,
        DIM=head_dim,
        PAGE=page_size,
        TOKEN_STRIDE=k_cache.stride(1),
        TILE=tile,
        TOKENS=tile_config.n_tokens,
        STAGES=tile_config.n_stages,
        IS_AHEAD=tile_config.is_ahead,
        HAS_PAIRS=has_pairs,
        USES_PTX=q.is_cuda,
        KV_STEP=results.head_steps[0],
        MEMBER_STEP=results.head_steps[1],
        HAS_SINKS=sinks is not None,
        HAS_LIMITS=has_limits,
        num_warps=tile_config.n_warps,
        **overlapping(q),
    )


@CachedKernel
@triton.jit
def _attend_decode(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    column: tl.tensor,
    q_stride: tl.tensor,
    page_stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    USES_PTX: tl.constexpr,
    KV_STEP: tl.constexpr,
    MEMBER_STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Items and order are written by a copy, which no kernel overlaps: they may be read before the wait.
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1)
    first_query = tl.load(item)
    n_queries = tl.load(item + column)
    first_entry = tl.load(item + 2 * column)
    begin = tl.load(item + 3 * column)
    end = tl.load(item + 4 * column)
    limit = tl.load(item + 5 * column)
    result = tl.load(item + 6 * column)
    if n_queries == 0:  # padding; items of real rows wait, so that no later kernel overtakes this one
        return
    pair = tl.arange(0, TILE)
    query = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    is_pair = query < n_queries
    row = tl.load(order + first_query + query, is_pair, 0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    n_words: tl.constexpr = DIM // 2 if HAS_PAIRS else DIM
    word = tl.arange(0, n_words)
    queries = q + row[:, None] * q_stride + head[:, None] * DIM
    if HAS_PAIRS:
        even_queries = tl.load(queries + 2 * word[None, :], is_pair[:, None], 0.0).to(tl.float16)
        odd_queries = tl.load(queries + 2 * word[None, :] + 1, is_pair[:, None], 0.0).to(tl.float16)
        odd_summed = tl.zeros([TILE, n_words], tl.float32)
    else:
        even_queries = tl.load(queries + word[None, :], is_pair[:, None], 0.0)
    summed = tl.zeros([TILE, n_words], tl.float32)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if IS_AHEAD:
        first = begin + tl.arange(0, TOKENS)
        page = tl.load(tables + first_entry + first // PAGE, first < end, 0)
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, TOKENS)
        is_token = token < end
        if not IS_AHEAD:
            page = tl.load(tables + first_entry + token // PAGE, is_token, 0)
        offset = page.to(tl.int64) * page_stride + (token % PAGE) * TOKEN_STRIDE + kv_head * n_words
        offsets = offset[:, None] + word[None, :]
        key = tl.load(k_cache + offsets, is_token[:, None], 0)
        if HAS_PAIRS:
            key, odd_key = split_e4m3(key, USES_PTX)
        score = tl.dot(even_queries, tl.trans(key))
        if HAS_PAIRS:
            score = tl.dot(odd_queries, tl.trans(odd_key), score)
        score *= scale
        is_seen = is_token[None, :]
        if HAS_LIMITS:
            is_seen = is_seen & (token[None, :] < (limit + query)[:, None])
        score = tl.where(is_seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        if HAS_LIMITS:  # a query may see none of these tokens
            higher = tl.maximum(higher, -1e30)
        rescale = tl.exp2(highest - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * rescale + tl.sum(weight, 1)
        highest = higher
        value = tl.load(v_cache + offsets, is_token[:, None], 0)
        if HAS_PAIRS:
            value, odd_value = split_e4m3(value, USES_PTX)
            odd_summed = odd_summed * rescale[:, None] + tl.dot(weight.to(odd_value.dtype), odd_value)
        summed = summed * rescale[:, None] + tl.dot(weight.to(value.dtype), value)
        if IS_AHEAD:
            token += TOKENS
            page = tl.load(tables + first_entry + token // PAGE, token < end, 0)
    if HAS_PAIRS:
        summed = tl.interleave(summed, odd_summed) * tl.where(result < 0, value_scale, 1.0)
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_pair & (result < 0), float("-inf"))
        total += tl.exp2(sink - highest)
    divisor = total
    if HAS_LIMITS:
        divisor = tl.where(total > 0, total, 1.0)
    attended = summed / divisor[:, None]
    attended = attended.to(out.dtype.element_ty)
    dim = tl.arange(0, DIM)
    n_heads: tl.constexpr = GROUP * KV_HEADS
    if result < 0:
        target = row.to(tl.int64) * n_heads + head
        tl.store(out + target[:, None] * DIM + dim[None, :], attended, is_pair[:, None])
    else:
        target = (result + query).to(tl.int64) * n_heads + kv_head * KV_STEP + pair % GROUP * MEMBER_STEP
        tl.store(values + target[:, None] * DIM + dim[None, :], attended, is_pair[:, None])
        tl.store(lse + target, tl.log2(total) + highest, is_pair)
