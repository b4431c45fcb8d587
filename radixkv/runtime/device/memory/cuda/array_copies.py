"""Asynchronous copies of small arrays between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Enqueues a copy of ``values`` to the device; the caller may change ``values`` at once.

    Torch's pinned allocator does not reuse the staging memory before the copy has run.
    """
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    host = torch.empty(values.shape, dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Enqueues a copy to the host, which is complete once the stream has reached it."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
