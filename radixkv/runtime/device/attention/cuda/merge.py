"""The kernel that merges partial results of attention."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two

FEW_PAIRS = 4096


def merge_results(
    values: Tensor,
    lse: Tensor,
    indptr: Tensor,
    indices: Tensor,
    order: Tensor,
    out: Tensor,
    *,
    group: int,
    head_steps: tuple[int, int],
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
    few_pairs: int = FEW_PAIRS,
) -> None:
    """Merges the partial results of query i into ``out[order[i]]``, for queries that have any.

    Args:
        values: [n, heads, head_dim], each divided by its own sum of exponentials.
        lse: [n, heads] float32, log2 of that sum; -inf for a result over no tokens.
        indptr: [queries + 1] int32.
        indices: [indptr[-1]] int32; query i has results ``indices[indptr[i] : indptr[i + 1]]``.
        order: [queries] int32.
        out: [queries, heads, head_dim].
        group: heads that share a KV head.
        head_steps: see ``PartialResults.head_steps``.
        value_scale: multiplier of the merged results.
        sinks: as for ``sinks.apply_sinks``.
        few_pairs: below this number of (query, head) pairs, each pair gets its own thread block.
    """
    n_queries, n_heads, head_dim = out.shape
    is_few = n_queries * n_heads < few_pairs
    heads = 1 if is_few else 8
    _merge_results[n_queries, -(-n_heads // heads)](
        values,
        lse,
        indptr,
        indices,
        order,
        out,
        lse if sinks is None else sinks,
        n_heads,
        value_scale,
        RESULTS=8 if is_few else 2,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim),
        GROUP=group,
        KV_STEP=head_steps[0],
        MEMBER_STEP=head_steps[1],
        IS_SCALED=value_scale != 1.0,
        HAS_SINKS=sinks is not None,
        num_warps=1 if is_few else 4,
        **overlapping(out),
    )


@CachedKernel
@triton.jit
def _merge_results(
    values: tl.tensor,
    lse: tl.tensor,
    indptr: tl.tensor,
    indices: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    n_heads: tl.tensor,
    value_scale: tl.tensor,
    RESULTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_STEP: tl.constexpr,
    MEMBER_STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # The lists of results are written by a copy, which no kernel overlaps: they may be read before the wait.
    query = tl.program_id(0)
    begin = tl.load(indptr + query)
    end = tl.load(indptr + query + 1)
    target = tl.load(order + query).to(tl.int64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < n_heads
    dim = tl.arange(0, DIM)
    stored = head // GROUP * KV_STEP + head % GROUP * MEMBER_STEP
    offsets = stored[:, None] * HEAD_DIM + dim[None, :]
    is_value = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, DIM], tl.float32)
    for first in range(begin, end, RESULTS):
        index = first + tl.arange(0, RESULTS)
        is_result = index < end
        result = tl.load(indices + index, is_result, 0).to(tl.int64)
        is_score = is_result[:, None] & is_head[None, :]
        score = tl.load(lse + result[:, None] * n_heads + stored[None, :], is_score, float("-inf"))
        value = tl.load(
            values + result[:, None, None] * n_heads * HEAD_DIM + offsets[None, :, :],
            is_result[:, None, None] & is_value[None, :, :],
            0.0,
        )
        higher = tl.maximum(highest, tl.max(score, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        rescale = tl.exp2(highest - safe)
        added = tl.exp2(score - safe[None, :])
        total = total * rescale + tl.sum(added, 0)
        summed = summed * rescale[:, None] + tl.sum(value.to(tl.float32) * added[:, :, None], 0)
        highest = higher
    if begin < end:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head, is_head, 0.0) - highest)
        merged = summed / total[:, None]
        if IS_SCALED:
            merged *= value_scale
        out_offsets = head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + target * n_heads * HEAD_DIM + out_offsets, merged.to(out.dtype.element_ty), is_value)
