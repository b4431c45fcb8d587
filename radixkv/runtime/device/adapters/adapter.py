"""An adapter as the device reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class ModuleShape(Protocol):
    """The sizes of what an adapter adds to one module of its base model: ``scale * B @ A @ x``."""

    @property
    def rank(self) -> int: ...

    @property
    def n_in(self) -> int: ...

    @property
    def n_out(self) -> int: ...

    @property
    def scale(self) -> float: ...


class Adapter(Protocol):
    """An adapter in a folder, whose tensors are read on request."""

    @property
    def digest(self) -> str:
        """Digest of all that decides what the adapter computes."""
        ...

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """What it changes, by the names of the base model's matrices, without the suffix ``.weight``."""
        ...

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """Reads A, [rank, in], and B, [out, rank], of a module. Raises ``CheckpointError``."""
        ...
