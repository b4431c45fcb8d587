"""The kernel that applies attention sinks to outputs of a kernel that knows none.

A sink is a score of its head that takes part in the softmax and has no value (GPT-OSS): it adds one exponential to
the sum by which an output is divided. It is added once for each output, however many partial results the output is
merged from. ``attend_decode`` and ``merge_results`` add it to the sums that they divide by. FlashInfer's kernels
divide by sums without it, and report these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Turns outputs of a softmax without sinks into outputs of one with sinks, in place.

    Args:
        out: [queries, heads, head_dim], contiguous; rounded once more.
        lse: [queries, heads] float32, contiguous: log2 of each output's sum of exponentials.
        sinks: [heads] float32: log2 of the exponential that each head adds to its sums.
    """
    n_queries, n_heads, head_dim = out.shape
    heads, dim = power_of_two(n_heads), power_of_two(head_dim)
    _apply_sinks[(n_queries,)](
        out,
        lse,
        sinks,
        n_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        num_warps=warps_for(heads * dim),
        **overlapping(out),
    )


@CachedKernel
@triton.jit
def _apply_sinks(
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    n_heads: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    head = tl.arange(0, HEADS)
    is_head = head < n_heads
    sink = tl.load(sinks + head, is_head, 0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64) * n_heads + head
    share = 1.0 / (1.0 + tl.exp2(sink - tl.load(lse + pair, is_head, 0.0)))
    dim = tl.arange(0, DIM)
    target = out + pair[:, None] * HEAD_DIM + dim[None, :]
    is_value = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    attended = tl.load(target, is_value, 0.0).to(tl.float32) * share[:, None]
    tl.store(target, attended.to(out.dtype.element_ty), is_value)
