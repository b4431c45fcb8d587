"""Objects in the memory of a Mooncake Store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from radixkv.errors import ConfigError, shortened
from radixkv.processes import parent_death
from radixkv.runtime.tiers.stores.blocking_calls import CallThreads
from radixkv.runtime.tiers.stores.object_store import ObjectStoreError

_N_PARALLEL = 8
_BUFFER_BYTES = 256 << 20
"""Memory in which the client keeps the objects that are on their way."""
_MIN_BUFFER_BYTES = 16 << 20
_CONNECT_TIMEOUT_S = 2.0
_SET_UP_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 2.0
_IS_FULL = -200
"""Mooncake's code of an object for which no memory is left."""
_IS_ABSENT = -704
"""Mooncake's code of an object that it does not have."""
_ARE_BUSY = (-703, -706, -708)
"""Mooncake's codes of an object that is being written, read or copied."""

_TRIAL = "import sys; from radixkv.runtime.tiers.stores.mooncake_objects import try_setup; try_setup(*sys.argv[1:])"

_T = TypeVar("_T")


class MooncakeObjects:
    """An ``ObjectStore`` in a Mooncake Store.

    Args:
        store: a client, a ``MooncakeDistributedStore``.
        prefix: beginning of the objects' names.
    """

    n_parallel = _N_PARALLEL

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._threads = CallThreads("mooncake-call")
        """A call blocks for up to 30 s while the master hangs."""

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        answers = await self._threads.run(
            lambda: self._store.batch_is_exist([self._prefix + name for name in names])
        )
        if any(answer < 0 for answer in answers):
            raise ObjectStoreError(f"Mooncake's code is {min(answers)}")
        return [bool(answer) for answer in answers]

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        value = await self._threads.run(lambda: self._store.get_buffer(self._prefix + name))
        if value is not None:
            return memoryview(value).cast("B")
        await self.have([name])  # raises if the master does not answer
        return None

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        code = await self._threads.run(lambda: self._store.put(self._prefix + name, value))
        if code not in (0, _IS_FULL):
            raise ObjectStoreError(f"Mooncake's code is {code}")
        return not code

    async def delete(self, name: str) -> bool:
        """See ``ObjectStore``. Also if the object was read just now, which Mooncake would protect for a while."""
        code = await self._threads.run(lambda: self._store.remove(self._prefix + name, True))
        if code not in (0, _IS_ABSENT, *_ARE_BUSY):
            raise ObjectStoreError(f"Mooncake's code is {code}")
        return code not in _ARE_BUSY

    def close(self) -> None:
        """See ``ObjectStore``. Mooncake's own threads may need longer; they end with the process."""
        closing = threading.Thread(target=self._store.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


def open_mooncake(url: str) -> MooncakeObjects:
    """Connects to a Mooncake Store over TCP. This client adds no memory to it.

    Args:
        url: ``mooncake://HOST:PORT/PREFIX`` with the address of the master; the prefix may be empty.

    Raises:
        ConfigError: the package cannot be loaded, or the master does not answer.
    """
    own_address, master = _addresses(url)
    _check_answers(url, own_address, master)
    try:
        store = _set_up(own_address, master, _BUFFER_BYTES)
    except ObjectStoreError as error:
        raise _unusable(url, str(error)) from error
    return MooncakeObjects(store, (urlsplit(url).path.strip("/") or "radixkv") + "/")


def _check_answers(url: str, own_address: str, master: str) -> None:
    """Sets a client up in a process of its own, which takes a second or two.

    Mooncake's ``setup`` waits minutes for a master that accepts connections and never answers. It holds Python's
    lock meanwhile, so that nothing in the same process can end it.

    Raises:
        ConfigError: the package cannot be loaded, or the master does not answer.
    """
    ends_with_this = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())]
    command = [*ends_with_this, sys.executable, "-c", _TRIAL, own_address, master]
    try:
        trial = subprocess.run(command, capture_output=True, timeout=_SET_UP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _unusable(
            url,
            f"the Mooncake master at {master} accepts connections and does not answer within "
            f"{_SET_UP_TIMEOUT_S:.0f} s; start it again, or correct the address",
        ) from None
    if trial.returncode:
        lines = (trial.stdout or trial.stderr).decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        raise _unusable(url, f"its client ended with {trial.returncode}: {reason}")


def try_setup(own_address: str, master: str) -> NoReturn:
    """Ends this process: with 0 if a client can be set up, else with 1 and a line that says why not."""
    try:
        _set_up(own_address, master, _MIN_BUFFER_BYTES)
    except ObjectStoreError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)  # Mooncake's own threads may need long to end


def _addresses(url: str) -> tuple[str, str]:
    """Returns the address by which other machines reach this one, and that of the master with its port.

    Raises:
        ConfigError: nothing accepts connections there.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or 0
        with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
            own_address = connection.getsockname()[0]
    except (OSError, ValueError) as error:  # ValueError: no such port
        raise _unusable(
            url, f"no Mooncake master answers there ({error}); start mooncake_master, or correct the address"
        ) from error
    return own_address, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_up(own_address: str, master: str, n_buffer_bytes: int) -> Any:
    """Returns a client, a ``MooncakeDistributedStore``. Raises ``ObjectStoreError``."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it writes a page of lines
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ObjectStoreError(f"the package of Mooncake does not load ({error})") from error
    store = MooncakeDistributedStore()
    if code := store.setup(own_address, "P2PHANDSHAKE", 0, n_buffer_bytes, "tcp", "", master):
        raise ObjectStoreError(f"Mooncake's code is {code}")
    return store


def _unusable(url: str, reason: str) -> ConfigError:
    return ConfigError(f"the shared cache {shortened(url)} cannot be used: {reason}")
