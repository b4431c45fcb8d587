"""What the ranks of a model do together, as one of them sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

COLLECTIVE_TIMEOUT_S = 1800.0
"""How long ranks that give signs of life may take for what others wait for: then one hangs, and none can go on.

What takes minutes may be right: first steps compile kernels, and a slow CPU computes a long prompt in one step."""
CONNECT_TIMEOUT_S = 60.0
"""How long a rank waits for the others' devices when all have loaded the model."""


class RankGroup(Protocol):
    """One rank's view of the others' processes while the model is opened."""

    @property
    def rank(self) -> int:
        """Number of this process among the ranks; rank 0 plans and samples."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def connecting(self) -> AbstractContextManager[Path]:
        """Waits until all ranks have come here; returns a block in which they connect their devices.

        The block gets the file by which the devices find each other. It is in a folder that no other user can read,
        and which is there only until all have left the block.

        Raises:
            ConfigError: another rank cannot compute its part, or has ended.
        """
        ...

    def minimum(self, value: int) -> int:
        """Waits until all ranks have come here; returns the least of their values.

        Raises:
            ConfigError: another rank cannot compute its part, or has ended.
        """
        ...

    def watch(self, give_up: Callable[[], None]) -> None:
        """Lets nobody wait for a rank that has ended, gives no sign of life, or hangs in a step.

        Rank 0 calls ``give_up``, perhaps in another thread, and ends the other ranks. They end with rank 0.
        """
        ...


class Collectives(Protocol):
    """One rank's part in what all ranks compute together, each in the same order."""

    rank: int
    """Number of this process among the ranks; rank 0 samples."""
    size: int
    """Number of ranks."""

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a tensor by rank 0's."""
        ...


class SummingCollectives(Collectives, Protocol):
    """``Collectives`` that sum any tensor."""

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors of one shape, added in the order of ranks: equal bits on each."""
        ...


class OneRank:
    """The ``Collectives`` of a model on one device, which do nothing."""

    rank = 0
    size = 1

    def broadcast(self, tensor: Tensor) -> None:
        """See ``Collectives.broadcast``."""
