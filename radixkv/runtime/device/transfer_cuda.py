"""Small arrays to the device and back, without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``numbers`` there; the caller may change them at once.

    Torch's pinned allocator gives the memory between to nobody until the copy has run.
    """
    dtype = torch.from_numpy(np.empty(0, numbers.dtype)).dtype
    host = torch.empty(numbers.shape, dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[...] = numbers
    return host.to(device, non_blocking=True)


def to_host(numbers: Tensor) -> Tensor:
    """A copy on the host, which is complete once the stream has come so far."""
    if not numbers.is_cuda:
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
