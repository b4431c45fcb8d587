"""The kernel that reads the GPU's clock."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping


def stamp(out: Tensor, index: int) -> None:
    """Stores in ``out[index]`` the time in nanoseconds when all earlier work has ended.

    All processors of a GPU share the clock, which never goes back; its resolution may be a microsecond.

    Args:
        out: [n] int64.
        index: below n.
    """
    _stamp[(1,)](out, index, num_warps=1, **overlapping(out))


@CachedKernel
@triton.jit(do_not_specialize=["index"])
def _stamp(out: tl.tensor, index: tl.tensor, OVERLAP: tl.constexpr) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(out + index, globaltimer())
