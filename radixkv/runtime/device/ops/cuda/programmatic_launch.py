"""Programmatic dependent launch: a kernel starts while the previous one ends."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def overlapping(x: Tensor) -> dict[str, bool]:
    """Returns launch options on ``x``'s device for a kernel with the constant ``OVERLAP``.

    From Hopper on, a kernel may start before the previous one has ended, and waits (``gdc_wait``) before it
    accesses memory that others write. Every kernel launched this way must wait, or later kernels could overtake it.

    Products and attention let the next kernel start at once (``gdc_launch_dependents``). Kernels of few short
    programs do so after their own wait: see docs/decisions/0054-when-the-next-kernel-starts.md.
    """
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper_or_newer(x) else {"OVERLAP": False}


def is_hopper_or_newer(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU of compute capability 9.0 or above."""
    return x.is_cuda and _capability(x.device) >= (9, 0)


def is_hopper(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU of compute capability 9.0."""
    return x.is_cuda and _capability(x.device) == (9, 0)


def has_much_shared_memory(x: Tensor) -> bool:
    """Whether a thread block may use 163 KB of shared memory, as on data centre GPUs; others allow 99 KB."""
    if not x.is_cuda:
        return False
    capability = _capability(x.device)
    return capability == (8, 0) or (9, 0) <= capability < (12, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability; cached, as torch takes microseconds and a step has hundreds of launches."""
    return torch.cuda.get_device_capability(device)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two of at least ``n``, which is positive: the sizes of tensors in kernels."""
    return 1 << (n - 1).bit_length()


def warps_for(n_elements: int, per_thread: int = 16) -> int:
    """Returns the warps, 1 to 16, of a program over a power of two of elements."""
    return min(max(n_elements // (32 * per_thread), 1), 16)
