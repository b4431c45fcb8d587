"""Contract between the shared store and what keeps its objects on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.errors import RadixKVError


class ObjectStoreError(RadixKVError):
    """An object store could not be reached, or refused what it was asked."""


class ObjectStore(Protocol):
    """Objects by name, which other servers read and write at the same time.

    The coroutines may be cancelled at any time, and run on one event loop. They raise ``ObjectStoreError`` with a
    reason of one line; that an object is absent is no error.
    """

    @property
    def n_parallel(self) -> int:
        """Calls that should be under way at once, for the full rate."""

    async def have(self, names: Sequence[str]) -> list[bool]:
        """Returns whether each object is there."""

    async def get(self, name: str) -> memoryview | None:
        """Returns an object's bytes; None if it is not there."""

    async def put(self, name: str, value: memoryview) -> bool:
        """Keeps an object, whole or not at all; returns False if there is no room for it."""

    async def delete(self, name: str) -> bool:
        """Removes an object, if it is there. Returns False if the store keeps it, as while it is being written."""

    def close(self) -> None:
        """Lets go of the store, within a second or two. No coroutine may be under way."""
