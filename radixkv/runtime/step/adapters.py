"""Protocols between the runtime loop and the adapters of a device."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class ReadAdapter(Protocol):
    """An adapter in host memory, of which the device knows nothing before ``put``."""

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
        """Host memory of its weights."""
        ...

    def put(self) -> None:
        """Loads it: rows may ask for it, where adapters have slots once it is in one. Called between turns.
        Microseconds a layer."""
        ...

    def discard(self) -> None:
        """Frees it, where ``put`` is never called. Any thread may call it."""
        ...


@runtime_checkable
class AdapterCopy(Protocol):
    """A loaded adapter on its way into a slot, of which steps know nothing before ``put``."""

    def fill(self) -> None:
        """Copies its weights into the slot, and waits for that. Any thread may call it, beside steps, but one copy
        at a time is filled."""
        ...

    def put(self) -> None:
        """Lets rows ask for it. Called between turns, after ``fill``. Microseconds."""
        ...

    def discard(self) -> None:
        """Frees the slot, where ``put`` is never called. Called between turns, and not beside ``fill``."""
        ...


class DeviceAdapters(Protocol):
    """The adapters of a device.

    A device may have fewer slots than adapters are loaded, see ``adapters.slots``. One without slots computes with
    all that are loaded; its copies do nothing.
    """

    sizes: dict[str, int]
    """Host memory of the weights of each loaded adapter, by its digest."""

    def read(self, name: str, path: str) -> ReadAdapter:
        """Reads a folder and checks that it fits the model. Any thread may call it, also beside steps.

        Cost: that of reading the files, of their digest, and of a copy of the weights.

        Raises:
            CheckpointError: the folder cannot be read, or the adapter not be served; names the adapter.
        """
        ...

    def remove(self, digest: str) -> None:
        """Unloads an adapter that is in no slot. Called between turns, while no row of a launched step asks for
        it."""
        ...

    def copy(self, digest: str) -> AdapterCopy:
        """Begins to copy a loaded adapter into a free slot. Called between turns. There is a free slot beside as
        many as steps can have adapters."""
        ...

    def withdraw(self, digest: str) -> None:
        """Frees the slot of an adapter. Called between turns, while no row of a launched step asks for it."""
        ...
