"""What ``--cache-url`` names: a store that servers share, opened before the size of its pages is known."""

from __future__ import annotations

from typing import Protocol

from radixkv.runtime.tiers.stores.object_store import ObjectStore
from radixkv.runtime.tiers.stores.page_store import PageStore
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from radixkv.runtime.tiers.stores.shared_store import SharedStore


class SharedCache(Protocol):
    """A store that servers share."""

    def open_store(self, *, page_bytes: int, page_token_bytes: int) -> PageStore:
        """Returns the store of a model's pages, which closes this with it.

        Args:
            page_bytes: size of a page.
            page_token_bytes: bytes of one page's tokens.

        Raises:
            ConfigError: the store cannot have pages of this size.
        """

    def close(self) -> None:
        """Lets go of the store."""


class ObjectCache:
    """A ``SharedCache`` in an ``ObjectStore``.

    Args:
        objects: the objects.
        url: the setting ``cache_url``.
    """

    def __init__(self, objects: ObjectStore, url: str) -> None:
        self._objects = objects
        self._name = f"the shared store {url}"

    def open_store(self, *, page_bytes: int, page_token_bytes: int) -> PageStore:
        """See ``SharedCache``."""
        return SharedStore(self._objects, self._name, page_bytes=page_bytes, page_token_bytes=page_token_bytes)

    def close(self) -> None:
        """See ``SharedCache``."""
        self._objects.close()


class SharedMemoryCache:
    """A ``SharedCache`` in memory that the servers of one machine map.

    Args:
        url: the setting ``cache_url``.

    Raises:
        ConfigError: there is no room, or what is there cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._segment = Segment(url)
        self._name = f"the shared memory {url}"

    def open_store(self, *, page_bytes: int, page_token_bytes: int) -> PageStore:
        """See ``SharedCache``."""
        return SharedMemoryStore(
            self._segment, self._name, page_bytes=page_bytes, page_token_bytes=page_token_bytes
        )

    def close(self) -> None:
        """See ``SharedCache``."""
        self._segment.close()
