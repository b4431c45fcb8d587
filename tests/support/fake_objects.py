"""A fake store of objects in a dict, which fails, hangs or is full when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from radixkv.runtime.tiers.stores.object_store import ObjectStoreError
from radixkv.runtime.tiers.stores.shared_store import SharedStore
from support.page_files import PAGE_TOKEN_BYTES, TIMEOUT_S

PAGE_BYTES = 512


class FakeObjects:
    """An ``ObjectStore`` in a dict, which several stores may share."""

    n_parallel = 4

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.questions: list[list[str]] = []
        """Names of each call of ``have``."""
        self.n_calls = 0
        self.fails = False
        self.is_full = False
        self.kept: set[str] = set()
        """Names of objects that ``delete`` keeps."""
        self.is_open = threading.Event()
        """Calls wait until it is set."""
        self.is_open.set()

    async def have(self, names: Sequence[str]) -> list[bool]:
        self.questions.append(list(names))
        await self._answer()
        return [name in self.objects for name in names]

    async def get(self, name: str) -> memoryview | None:
        await self._answer()
        return memoryview(self.objects[name]) if name in self.objects else None

    async def put(self, name: str, value: memoryview) -> bool:
        await self._answer()
        if not self.is_full:
            self.objects[name] = bytes(value)
        return not self.is_full

    async def delete(self, name: str) -> bool:
        await self._answer()
        if name not in self.kept:
            self.objects.pop(name, None)
        return name not in self.kept

    def close(self) -> None:
        pass

    async def _answer(self) -> None:
        self.n_calls += 1
        await asyncio.sleep(0)
        while not self.is_open.is_set():
            await asyncio.sleep(0.001)
        if self.fails:
            raise ObjectStoreError("the network is down")


@contextmanager
def shared_store(objects: FakeObjects, page_bytes: int = PAGE_BYTES, **settings: Any) -> Iterator[SharedStore]:
    """Opens a store, and closes it without dropping stores."""
    store = SharedStore(
        objects, "the shared store", page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES, **settings
    )
    try:
        yield store
    finally:
        store.close(TIMEOUT_S)
