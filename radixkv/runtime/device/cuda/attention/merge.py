"""Partial results of attention, merged; and queries put in another order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.cuda.kernels.launch import overlapping, power_of_two, warps_for

_FEW = 4096
"""(Query, head) pairs, below which each has a block of threads of its own."""


def merge(
    values: Tensor,
    lse: Tensor,
    indptr: Tensor,
    listed: Tensor,
    order: Tensor,
    out: Tensor,
    *,
    group: int,
    head_steps: tuple[int, int],
) -> None:
    """``out[order[i]]`` = the attention over all that query i's results were computed from, where it has any.

    Args:
        values: [n, heads, head_dim], each divided by its own sum of exponentials.
        lse: [n, heads] float32, log2 of that sum; -inf for one of nothing.
        indptr: [queries + 1] int32.
        listed: [indptr[-1]] int32; query i has results ``listed[indptr[i] : indptr[i + 1]]``.
        order: [queries] int32.
        out: [queries, heads, head_dim].
        group: heads that share a KV head.
        head_steps: ``Results.head_steps``.
    """
    n_queries, n_heads, head_dim = out.shape
    is_few = n_queries * n_heads < _FEW
    heads = 1 if is_few else 8
    _merge[n_queries, triton.cdiv(n_heads, heads)](
        values,
        lse,
        indptr,
        listed,
        order,
        out,
        n_heads,
        RESULTS=8 if is_few else 2,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim),
        GROUP=group,
        KV_STEP=head_steps[0],
        MEMBER_STEP=head_steps[1],
        num_warps=1 if is_few else 4,
        **overlapping(out),
    )


@triton.jit
def _merge(
    values: tl.tensor,
    lse: tl.tensor,
    indptr: tl.tensor,
    listed: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    n_heads: tl.tensor,
    RESULTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_STEP: tl.constexpr,
    MEMBER_STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # What results belong where comes by a copy, which no kernel overlaps; it may be read before the wait.
    query = tl.program_id(0)
    begin = tl.load(indptr + query)
    end = tl.load(indptr + query + 1)
    target = tl.load(order + query).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < n_heads
    dim = tl.arange(0, DIM)
    stored = head // GROUP * KV_STEP + head % GROUP * MEMBER_STEP
    place = stored[:, None] * HEAD_DIM + dim[None, :]
    is_place = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, DIM], tl.float32)
    for first in range(begin, end, RESULTS):
        index = first + tl.arange(0, RESULTS)
        is_result = index < end
        result = tl.load(listed + index, is_result, 0).to(tl.int64)
        is_score = is_result[:, None] & is_head[None, :]
        score = tl.load(lse + result[:, None] * n_heads + stored[None, :], is_score, float("-inf"))
        value = tl.load(
            values + result[:, None, None] * n_heads * HEAD_DIM + place[None, :, :],
            is_result[:, None, None] & is_place[None, :, :],
            0.0,
        )
        higher = tl.maximum(highest, tl.max(score, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(highest - safe)
        added = tl.exp2(score - safe[None, :])
        total = total * kept + tl.sum(added, 0)
        summed = summed * kept[:, None] + tl.sum(value.to(tl.float32) * added[:, :, None], 0)
        highest = higher
    if begin < end:
        merged = summed / total[:, None]
        given = head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + target * n_heads * HEAD_DIM + given, merged.to(out.dtype.element_ty), is_place)


def gather(x: Tensor, sources: Tensor, out: Tensor) -> None:
    """``out[i] = x[sources[i]]``.

    Args:
        x: [rows, ...], contiguous within a row.
        sources: [n] int32.
        out: [n, ...], contiguous.
    """
    size = out[0].numel()
    block = min(power_of_two(size), 4096)
    _gather[len(sources), triton.cdiv(size, block)](
        x, sources, out, x.stride(0), size, BLOCK=block, num_warps=8, **overlapping(out)
    )


@triton.jit
def _gather(
    x: tl.tensor,
    sources: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row).to(tl.int64)
    is_value = place < size
    values = tl.load(x + source * stride + place, is_value)
    tl.store(out + row.to(tl.int64) * size + place, values, is_value)


def spread(q: Tensor, order: Tensor, copies: Tensor, out: Tensor, *, n_items: int, n_rows: int, group: int) -> None:
    """Each item's queries, at the places of their results, with the heads of one KV head apart.

    Args:
        q: [rows, heads, head_dim], contiguous within a row.
        order: [rows] int32: the row of each query.
        copies: [3, capacity] int32: each item's first query, how many, and where the first one goes.
        out: [results, group, kv_heads, head_dim].
        n_items: the grid, padding included.
        n_rows: of an item, at most.
        group: heads that share a KV head.
    """
    n_heads, head_dim = q.shape[1:]
    size = power_of_two(n_heads * head_dim)
    _spread[n_items, n_rows](
        q,
        order,
        copies,
        out,
        copies.stride(0),
        q.stride(0),
        GROUP=group,
        KV_HEADS=n_heads // group,
        DIM=head_dim,
        SIZE=size,
        num_warps=warps_for(size),
        **overlapping(out),
    )


@triton.jit
def _spread(
    q: tl.tensor,
    order: tl.tensor,
    copies: tl.tensor,
    out: tl.tensor,
    column: tl.tensor,
    stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    item = copies + tl.program_id(0)
    query = tl.program_id(1)
    is_query = query < tl.load(item + column)
    row = tl.load(order + tl.load(item) + query, is_query, 0).to(tl.int64)
    target = (tl.load(item + 2 * column) + query).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, SIZE)
    head = place // DIM
    is_value = is_query & (head < GROUP * KV_HEADS)
    stored = head % GROUP * KV_HEADS + head // GROUP
    values = tl.load(q + row * stride + place, is_value)
    tl.store(out + target * (GROUP * KV_HEADS * DIM) + stored * DIM + place % DIM, values, is_value)
