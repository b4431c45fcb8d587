"""Keeps the server's runtime process running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from radixkv.errors import RadixKVError, RuntimeDied
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.runtime_process import RuntimeProcess

MAX_RESTARTS = 5
"""How often a runtime is started again before the server gives up."""
SETTLED_S = 600.0
"""A runtime that has served for so long makes the count of restarts begin anew, as in Kubernetes."""
FIRST_DELAY_S = 1.0
"""Wait before the second restart in a row; each further one waits twice as long, and the first one not at all."""


class StartRuntime(Protocol):
    """Starts a runtime process for the server's client."""

    async def __call__(self, *, first_event_number: int) -> RuntimeProcess:
        """Returns the process once it is ready. Raises ``RadixKVError`` if it fails, and ``OSError``."""
        ...


class Supervisor:
    """Watches the runtime process, and starts it again when it dies, unless that happens too often.

    Requests in flight fail: they are not sent to the new process.

    Args:
        process: the process.
        client: connected to it.
        start: starts another one.
        restarts: whether to start another one at all.
        resume: loads what the process before had loaded since its start, and resumes the client; returns whether
            it did. None: there is nothing but the client to resume.
        max_restarts: how often a runtime is started again before the server gives up.
        settled_s: a runtime that has served for so long makes the count of restarts begin anew.
        first_delay_s: wait before the second restart in a row; each further one waits twice as long.
    """

    def __init__(
        self,
        process: RuntimeProcess,
        client: RuntimeClient,
        start: StartRuntime,
        *,
        restarts: bool,
        resume: Callable[[RuntimeClient], Awaitable[bool]] | None = None,
        max_restarts: int = MAX_RESTARTS,
        settled_s: float = SETTLED_S,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self._max_restarts = max_restarts
        self._settled_s = settled_s
        self._first_delay_s = first_delay_s
        self._restarts = restarts
        self._resume = resume
        self._process = process
        self._client = client
        self._start = start
        self._ready = process.ready
        """The sizes that requests are checked against. Every later process must have the same."""
        self._start_s = process.start_s
        self._next_event_number = 0
        self._n_restarts = 0
        """In a row, without a process that has served for ``settled_s``."""

    async def run(self, heartbeat_timeout_s: float) -> RuntimeDied:
        """Supervises until the process is dead and not started again; returns the error that ends the server.

        All requests have then failed with that error.

        Args:
            heartbeat_timeout_s: a process that sends nothing for longer is killed.
        """
        while True:
            reason: str | None = await self._process.watch(heartbeat_timeout_s)
            if time.monotonic() - self._process.ready_at >= self._settled_s:
                self._n_restarts = 0
            while reason is not None:
                if not self._restarts or self._n_restarts == self._max_restarts:
                    return self._give_up(reason)
                reason = await self._restart(reason)

    def stop_restarting(self) -> None:
        """Starts no process again that dies from now on."""
        self._restarts = False

    def kill(self) -> None:
        """Kills the process if it is in the middle of its work; ``stop`` must follow."""
        if self._client.n_in_flight:
            self._process.kill()

    async def stop(self) -> None:
        """Ends the process: by a drain if it is idle, by a kill otherwise. ``run`` must have ended."""
        await self._process.stop()

    async def _restart(self, reason: str) -> str | None:
        """Starts a process in place of the one that died for ``reason``.

        Returns None once it is ready, or has died again, or the reason why it failed.
        """
        delay_s = self._first_delay_s * 2 ** (self._n_restarts - 1) if self._n_restarts else 0.0
        self._n_restarts += 1
        log_line(f"{reason}; it is started again (restart {self._n_restarts} of at most {self._max_restarts})")
        self._client.fail(
            RuntimeDied(f"{reason}; it is being started again, without this request: send the request again"),
            RuntimeRestarting(
                f"{self._process.name} died and is being started again; try again later",
                ready_at=time.monotonic() + delay_s + self._start_s,
            ),
        )
        self._next_event_number = self._process.next_event_number or self._next_event_number
        await self._process.stop()
        await asyncio.sleep(delay_s)
        try:
            process = await self._start(first_event_number=self._next_event_number)
        except (RadixKVError, OSError) as error:
            self._next_event_number += 1  # it may have published that the cache is empty
            return str(error)
        self._process = process
        # It has no adapters yet: those of the start may have been unloaded, and others loaded.
        if msgspec.structs.replace(process.ready, adapters=self._ready.adapters) != self._ready:
            return f"{process.name} that was started again has other sizes: {process.ready}, not {self._ready}"
        self._start_s = process.start_s
        if self._resume is None:
            self._client.resume()
        elif not await self._resume(self._client):
            return None
        log_line(f"{process.name} is ready again after {process.start_s:.1f} s")
        return None

    def _give_up(self, reason: str) -> RuntimeDied:
        if self._n_restarts == self._max_restarts:
            reason += f", after {self._max_restarts} restarts without {self._settled_s:g} s of service"
        error = RuntimeDied(f"{reason}; start the server again")
        self._client.fail(error)
        return error
