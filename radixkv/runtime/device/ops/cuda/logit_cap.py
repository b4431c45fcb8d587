"""The kernel that limits logits by a hyperbolic tangent, in place: torch would need copies in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_BLOCK = 4096
"""Logits per program."""


def cap_logits(logits: Tensor, cap: float) -> None:
    """Computes ``logits = cap * tanh(logits / cap)`` in float32, rounded once.

    Args:
        logits: [rows, vocab] bfloat16, float16 or float32, contiguous.
        cap: above 0.
    """
    n_rows, size = logits.shape
    _cap[n_rows, -(-size // _BLOCK)](logits, cap, SIZE=size, BLOCK=_BLOCK, num_warps=8, **overlapping(logits))


@CachedKernel
@triton.jit
def _cap(logits: tl.tensor, cap: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = logits + tl.program_id(0).to(tl.int64) * SIZE + column
    full = tl.load(target, column < SIZE, 0.0).to(tl.float32)
    decay = tl.exp(tl.abs(full) * (-2.0 / cap))
    limited = (1.0 - decay) / (1.0 + decay) * cap
    limited = tl.where(full < 0, -limited, limited)
    tl.store(target, limited.to(logits.dtype.element_ty), column < SIZE)
