"""Kernels that copy queries into the order in which large tiles read them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.kv_dtype import FP8_MAX
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8 import to_fp8
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def gather_queries(x: Tensor, sources: Tensor, out: Tensor) -> None:
    """``out[i] = x[sources[i]]``.

    Args:
        x: [rows, ...], contiguous within a row.
        sources: [n] int32.
        out: [n, ...], contiguous.
    """
    size = out[0].numel()
    block = min(power_of_two(size), 4096)
    _gather_queries[len(sources), -(-size // block)](
        x, sources, out, x.stride(0), size, BLOCK=block, num_warps=8, **overlapping(out)
    )


@CachedKernel
@triton.jit
def _gather_queries(
    x: tl.tensor,
    sources: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row).to(tl.int64)
    is_value = offsets < size
    values = tl.load(x + source * stride + offsets, is_value)
    tl.store(out + row.to(tl.int64) * size + offsets, values, is_value)


def copy_item_queries(
    q: Tensor, order: Tensor, copies: Tensor, out: Tensor, *, n_items: int, n_rows: int, group: int
) -> None:
    """Copies each item's queries to the indices of their results, with the head index within the KV head before the
    KV head.

    Args:
        q: [rows, heads, head_dim], contiguous within a row.
        order: [rows] int32: the row of each query.
        copies: [3, capacity] int32: each item's first query, number of queries, and index of the first result.
        out: [results, group, kv_heads, head_dim], of the dtype of ``q`` or in ``float8_e4m3fn``.
        n_items: items to launch, padding included.
        n_rows: most rows of an item.
        group: heads that share a KV head.
    """
    n_heads, head_dim = q.shape[1:]
    size = power_of_two(n_heads * head_dim)
    _copy_item_queries[n_items, n_rows](
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
        LARGEST=None if out.dtype == q.dtype else FP8_MAX,
        num_warps=warps_for(size),
        **overlapping(out),
    )


@CachedKernel
@triton.jit
def _copy_item_queries(
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
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    item = copies + tl.program_id(0)
    query = tl.program_id(1)
    is_query = query < tl.load(item + column)
    row = tl.load(order + tl.load(item) + query, is_query, 0).to(tl.int64)
    target = (tl.load(item + 2 * column) + query).to(tl.int64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    offsets = tl.arange(0, SIZE)
    head = offsets // DIM
    is_value = is_query & (head < GROUP * KV_HEADS)
    stored = head % GROUP * KV_HEADS + head // GROUP
    values = tl.load(q + row * stride + offsets, is_value)
    if LARGEST is not None:
        values = to_fp8(values, 1.0, LARGEST)
    tl.store(out + target * (GROUP * KV_HEADS * DIM) + stored * DIM + offsets % DIM, values, is_value)
