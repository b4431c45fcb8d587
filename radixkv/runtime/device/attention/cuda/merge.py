"""Partial results of attention, and the kernel that merges them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.attention.cuda.base import AttentionShape, LayerTensors
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two

FEW_PAIRS = 4096


@dataclass(frozen=True)
class PartialResults:
    """Partial results of attention, to be merged."""

    workspace: Tensor
    """The memory of ``values`` and ``lse``, as FlashInfer's FA2 kernel takes it."""
    values: Tensor
    """[n, heads, head_dim]: each divided by its sum of exponentials."""
    lse: Tensor
    """[n, heads] float32: log2 of each result's sum of exponentials; -inf for a result over no tokens."""
    head_steps: tuple[int, int]
    """Distance between the first heads of two KV heads, and between two heads of one KV head."""

    @classmethod
    def allocate(
        cls, n: int, shape: AttentionShape, device: torch.device, *, by_member: bool = False
    ) -> PartialResults:
        """Allocates memory for ``n`` results.

        Args:
            n: number of results.
            shape: of the layer.
            device: where to allocate.
            by_member: whether heads are ordered by their index within the KV head first, as ``Fa3Kernel`` stores
                the results of large items.
        """
        n_values = n * shape.n_heads
        n_bytes = n_values * shape.head_dim * shape.dtype.itemsize
        workspace = torch.zeros(n_bytes + 4 * n_values, dtype=torch.uint8, device=device)
        values = workspace[:n_bytes].view(shape.dtype).view(n, shape.n_heads, shape.head_dim)
        lse = workspace[n_bytes:].view(torch.float32).view(n, shape.n_heads)
        return cls(workspace, values, lse, (1, shape.n_kv_heads) if by_member else (shape.group, 1))


def merge_results(
    layer: LayerTensors,
    results: PartialResults,
    indptr: Tensor,
    indices: Tensor,
    order: Tensor,
    *,
    few_pairs: int = FEW_PAIRS,
) -> None:
    """Merges the partial results of query i into ``layer.out[order[i]]``, for queries that have any.

    Args:
        layer: of these queries; V's scale and the sinks are applied to the merged results.
        results: the partial results.
        indptr: [queries + 1] int32.
        indices: [indptr[-1]] int32; query i has results ``indices[indptr[i] : indptr[i + 1]]``.
        order: [queries] int32.
        few_pairs: below this number of (query, head) pairs, each pair gets its own thread block.
    """
    out, value_scale, sinks = layer.out, layer.scales.v, layer.sinks
    n_queries, n_heads, head_dim = out.shape
    is_few = n_queries * n_heads < few_pairs
    heads = 1 if is_few else 8
    _merge_results[n_queries, -(-n_heads // heads)](
        results.values,
        results.lse,
        indptr,
        indices,
        order,
        out,
        results.lse if sinks is None else sinks,
        n_heads,
        value_scale,
        RESULTS=8 if is_few else 2,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim),
        GROUP=n_heads // layer.k_cache.shape[2],
        KV_STEP=results.head_steps[0],
        MEMBER_STEP=results.head_steps[1],
        IS_SCALED=value_scale != 1.0,
        HAS_SINKS=sinks is not None,
        num_warps=(2 if head_dim > 256 else 1) if is_few else 4,  # 4,096 values of a block need two warps
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
