"""Protocols between the runtime loop and the adapters of a device."""

from __future__ import annotations

from typing import Protocol


class ReadAdapter(Protocol):
    """An adapter in memory, of which steps know nothing before ``put``."""

    @property
    def digest(self) -> str:
        """Digest of what it computes, by which rows ask for it."""
        ...

    @property
    def invocation_tokens(self) -> tuple[int, ...] | None:
        """Of an activated LoRA: rows ask for it from their last occurrence in a prompt on. None: from its start."""
        ...

    @property
    def n_bytes(self) -> int:
        """Memory of its weights."""
        ...

    def put(self) -> None:
        """Lets rows ask for it. Called between turns. Microseconds a layer."""
        ...

    def discard(self) -> None:
        """Frees it, where ``put`` is never called. Any thread may call it."""
        ...


class DeviceAdapters(Protocol):
    """The adapters of a device."""

    sizes: dict[str, int]
    """Memory of the weights of each adapter that rows may ask for, by its digest."""

    def read(self, name: str, path: str) -> ReadAdapter:
        """Reads a folder and checks that it fits the model. Any thread may call it, also beside steps.

        Cost: that of reading the files, of their digest, and of a copy of the weights.

        Raises:
            CheckpointError: the folder cannot be read, or the adapter not be served; names the adapter.
        """
        ...

    def remove(self, digest: str) -> None:
        """Frees an adapter. Called between turns, while no row of a launched step asks for it."""
        ...
