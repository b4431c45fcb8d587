"""How kernels are launched: one after another, each starting while the one before it ends."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor


def overlapping(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel on ``x``'s device that takes the constant ``OVERLAP``.

    From Hopper on a kernel may start before the one ahead of it has ended, and waits inside (``gdc_wait``) before
    it touches what others write. Every kernel that is launched so must wait, or those behind it could pass it.
    """
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper_or_newer(x) else {"OVERLAP": False}


def is_hopper_or_newer(x: Tensor) -> bool:
    """By compute capability: 9.0 or above."""
    return x.is_cuda and _capability(x.device) >= (9, 0)


def has_much_shared_memory(x: Tensor) -> bool:
    """By compute capability: a block of threads may have 163 KB or more on GPUs for data centres, 99 on others."""
    if not x.is_cuda:
        return False
    capability = _capability(x.device)
    return capability == (8, 0) or (9, 0) <= capability < (12, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Asked once: torch takes microseconds to say it, and a step without graphs has hundreds of launches."""
    return torch.cuda.get_device_capability(device)


def power_of_two(n: int) -> int:
    """The smallest one that is at least ``n``: what tensors inside of kernels measure."""
    return int(triton.next_power_of_2(n))


def warps_for(n_elements: int, per_thread: int = 16) -> int:
    """Warps of a program over a power of two of elements, 1 to 16."""
    return min(max(n_elements // (32 * per_thread), 1), 16)
