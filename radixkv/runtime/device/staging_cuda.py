"""The small integers that a step needs on the device: one pinned buffer, one host-to-device copy.

A part of the device declares its *fields* once, in a ``Layout``; each step fills a ``Staged`` on the host and sends
it. The device's side of a field never moves, so that CUDA graphs can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """A place in the buffer, in int32 numbers."""

    first: int
    size: int


class Layout:
    """Hands out fields, one after another, each at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self.size = 0
        """Int32 numbers in all."""

    def field(self, size: int) -> Field:
        """Room for ``size`` numbers."""
        field = Field(self.size, size)
        self.size += -(-size // 4) * 4
        return field


class Staged:
    """One step's numbers on the host; its fields hold what was there before until they are filled."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._numbers: NDArray[np.int32] = buffer.numpy()

    def __getitem__(self, field: Field) -> NDArray[np.int32]:
        """A view of the field."""
        return self._numbers[field.first : field.first + field.size]


class Staging:
    """The device's side of a layout's fields.

    Args:
        layout: complete; fields that are declared later have no place.
        device: where.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._size = layout.size
        self._numbers = torch.zeros(layout.size, dtype=torch.int32, device=device)

    def stage(self) -> Staged:
        """An empty host buffer. Its memory is used again only after its copy has run: torch's pinned allocator
        records the event."""
        return Staged(torch.empty(self._size, dtype=torch.int32, pin_memory=True))

    def send(self, staged: Staged) -> None:
        """Copies on the current stream; the host does not wait, and must not change ``staged`` any more."""
        self._numbers.copy_(staged.buffer, non_blocking=True)

    def view(self, field: Field) -> Tensor:
        """[field.size] int32 on the device."""
        return self._numbers[field.first : field.first + field.size]
