"""Objects in the memory of a Mooncake Store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from radixkv.errors import ConfigError, shortened
from radixkv.runtime.cache.tiers.object_store import ObjectStoreError

_N_PARALLEL = 8
_BUFFER_BYTES = 256 << 20
"""Memory in which the client keeps the objects that are on their way."""
_CONNECT_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_IS_FULL = -200
"""Mooncake's code of an object for which no memory is left."""

_T = TypeVar("_T")


class MooncakeObjects:
    """An ``ObjectStore`` in a Mooncake Store, over TCP. This client adds no memory to it.

    Args:
        url: ``mooncake://HOST:PORT/PREFIX`` with the address of the master; the prefix may be empty.

    Raises:
        ConfigError: the package cannot be loaded, or the master does not answer.
    """

    n_parallel = _N_PARALLEL

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._prefix = (parts.path.strip("/") or "radixkv") + "/"
        try:
            address = (parts.hostname or "", parts.port or 0)
            with socket.create_connection(address, _CONNECT_TIMEOUT_S) as connection:
                own_address = connection.getsockname()[0]  # by which the other machines reach this one
        except (OSError, ValueError) as error:  # ValueError: no such port
            raise ConfigError(
                f"the shared cache {shortened(url)} cannot be used: no Mooncake master answers there ({error}); "
                "start mooncake_master, or correct the address"
            ) from error
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it writes a page of lines at the start
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"the shared cache {shortened(url)} cannot be used: the package of Mooncake does not load ({error})"
            ) from error
        self._store = MooncakeDistributedStore()
        master = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        code = self._store.setup(own_address, "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", master)
        if code:
            raise ConfigError(f"the shared cache {shortened(url)} cannot be used: Mooncake's code is {code}")

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        answers = await _in_thread(lambda: self._store.batch_is_exist([self._prefix + name for name in names]))
        if any(answer < 0 for answer in answers):
            raise ObjectStoreError(f"Mooncake's code is {min(answers)}")
        return [bool(answer) for answer in answers]

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        value = await _in_thread(lambda: self._store.get_buffer(self._prefix + name))
        if value is not None:
            return memoryview(value).cast("B")
        await self.have([name])  # raises if the master does not answer
        return None

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        code = await _in_thread(lambda: self._store.put(self._prefix + name, value))
        if code not in (0, _IS_FULL):
            raise ObjectStoreError(f"Mooncake's code is {code}")
        return not code

    async def delete(self, name: str) -> None:
        """See ``ObjectStore``. Also if the object was read just now, which Mooncake would protect for a while."""
        await _in_thread(lambda: self._store.remove(self._prefix + name, True))

    def close(self) -> None:
        """See ``ObjectStore``. Mooncake's own threads may need longer; they end with the process."""
        closing = threading.Thread(target=self._store.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


async def _in_thread(call: Callable[[], _T]) -> _T:
    """Awaits a blocking call in a thread of its own, which nobody waits for if this is cancelled.

    A call of Mooncake blocks for up to 30 s while the master hangs; threads of a pool would keep the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def end(set_outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            set_outcome()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            outcome = partial(future.set_result, call())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(end, outcome)

    threading.Thread(target=run, name="mooncake-call", daemon=True).start()
    return await future
