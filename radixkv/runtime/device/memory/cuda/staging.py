"""Staging of a step's small integers: a pinned buffer that is sent in one host-to-device copy.

Each component adds its *fields* to a ``StagingLayout`` once; each step fills a ``StagingBuffer`` on the
host and sends it. The device side of a field has a fixed address, so that CUDA graphs can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StagingField:
    """A range of the staging buffer, in int32 elements."""

    first: int
    size: int


class StagingLayout:
    """Assigns fields to consecutive ranges of the buffer, each aligned to 16 bytes."""

    def __init__(self) -> None:
        self.size = 0
        """Int32 elements of all fields."""

    def field(self, size: int) -> StagingField:
        """Adds a field of ``size`` int32 elements."""
        field = StagingField(self.size, size)
        self.size += -(-size // 4) * 4
        return field


class StagingBuffer:
    """One step's staging buffer on the host. Fields are uninitialised until they are filled."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._values: NDArray[np.int32] = buffer.numpy()

    def __getitem__(self, field: StagingField) -> NDArray[np.int32]:
        """[field.size] int32: a view of the field."""
        return self._values[field.first : field.first + field.size]


class Staging:
    """The device side of a layout's fields.

    Args:
        layout: with all fields added; fields added later are not staged.
        device: where the buffer is allocated.
    """

    def __init__(self, layout: StagingLayout, device: torch.device) -> None:
        self.device = device
        self._size = layout.size
        self._values = torch.zeros(layout.size, dtype=torch.int32, device=device)

    def stage(self) -> StagingBuffer:
        """Returns an uninitialised host buffer. Its memory is reused only after its copy has run: torch's pinned
        allocator records the event."""
        return StagingBuffer(torch.empty(self._size, dtype=torch.int32, pin_memory=True))

    def send(self, staged: StagingBuffer) -> None:
        """Copies the buffer on the current stream without waiting; ``staged`` must not change afterwards."""
        self._values.copy_(staged.buffer, non_blocking=True)

    def view(self, field: StagingField) -> Tensor:
        """[field.size] int32: a view of the field on the device."""
        return self._values[field.first : field.first + field.size]
