"""Start, watch and stop the runtime process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec

from radixkv.config import EngineConfig
from radixkv.errors import RadixKVError, RuntimeDied
from radixkv.frontend.client import Client
from radixkv.frontend.in_flight import Latencies
from radixkv.wire import LOCK_NAME, SOCKET_NAME, Fatal, Ready, Start

FOLDER_PREFIX = "radixkv-"
RUNTIME = (sys.executable, "-m", "radixkv.runtime.process")
CHECK_TIMEOUT_S = 120.0
"""How long it may take to import torch and look at a GPU."""
START_TIMEOUT_S = 600.0
"""How long a runtime may load its model, which is on the disk already, before it counts as hung."""
STOP_S = 1.0
"""How long a drained runtime may take to end before it is killed."""


class Runtime:
    """The runtime process and the client that talks to it. Made by ``start``."""

    def __init__(self, process: Process, client: Client, ready: Ready, holds: AsyncExitStack) -> None:
        self.client = client
        self.ready = ready
        self._process = process
        self._holds = holds

    @classmethod
    async def start(
        cls,
        engine: EngineConfig,
        checkpoint_folder: Path,
        latencies: Latencies,
        *,
        command: Sequence[str] = RUNTIME,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Spawns the process and waits until it has loaded the model. Seconds.

        Raises:
            ConfigError, CheckpointError, WireError: as the runtime said.
            RadixKVError: it ended for another reason, or was not ready within ``timeout_s`` and was killed.
        """
        _sweep(Path(tempfile.gettempdir()))
        async with AsyncExitStack() as holds:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
            holds.callback(shutil.rmtree, folder, ignore_errors=True)
            socket_path = str(folder / SOCKET_NAME)
            client = Client(socket_path, latencies)
            holds.push_async_callback(client.close)
            process = await _spawn(command)
            holds.push_async_callback(_end, process)
            _hand_over(process, Start(engine, str(checkpoint_folder), socket_path))
            ready = await _ready_or_dead(process, client, timeout_s)
            return cls(process, client, ready, holds.pop_all())

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def watch(self, heartbeat_timeout_s: float) -> RuntimeDied:
        """Waits until the process is dead, or silent for too long and therefore killed.

        Then all requests in flight have failed with the error that it returns.
        """
        dead = asyncio.create_task(self._process.wait())
        silence = asyncio.create_task(self._silence(heartbeat_timeout_s))
        try:
            await asyncio.wait({dead, silence}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                reason = f"the runtime process {_ending(dead.result())}"
                if (fatal := await _last_word(self._process)) is not None:
                    reason += f": {fatal.text}"
            else:
                reason = f"the runtime process was silent for {heartbeat_timeout_s:g} s and was killed"
                self.kill()
        finally:
            dead.cancel()
            silence.cancel()
        error = RuntimeDied(f"{reason}; start the server again")
        self.client.fail(error)
        return error

    def kill(self) -> None:
        """Ends the process in the middle of its work; ``stop`` must follow."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Ends the process, whatever it is doing, kindly if it is idle."""
        if self._process.returncode is None and self.client.in_flight == 0:
            self.client.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        await self._holds.aclose()

    async def _silence(self, limit_s: float) -> None:
        """Returns once no frame has come for ``limit_s``.

        Counted in short waits and not by the clock, so that a frontend that was itself suspended does not blame
        the runtime.
        """
        wait_s = min(0.5, limit_s / 10)
        silent_s, seen = 0.0, -1
        while silent_s < limit_s:
            await asyncio.sleep(wait_s)
            silent_s = silent_s + wait_s if seen == self.client.n_frames else 0.0
            seen = self.client.n_frames


async def check(
    engine: EngineConfig,
    checkpoint_folder: Path,
    *,
    command: Sequence[str] = (*RUNTIME, "--check"),
    timeout_s: float = CHECK_TIMEOUT_S,
) -> None:
    """Asks a process that has torch whether settings, machine and ``config.json`` fit. Seconds.

    Args:
        checkpoint_folder: need not hold weights yet.

    Raises:
        ConfigError, CheckpointError: they do not.
        RadixKVError: the process did not say, within ``timeout_s``.
    """
    async with AsyncExitStack() as holds:
        process = await _spawn(command)
        holds.push_async_callback(_end, process)
        _hand_over(process, Start(engine, str(checkpoint_folder), socket_path=""))
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise RadixKVError(
                f"looking at the machine took longer than {timeout_s:g} s; start the server again"
            ) from None
        if (fatal := await _last_word(process)) is not None:
            raise fatal.error()
        if code != 0:
            raise RadixKVError(f"the process that looks at the machine ended with code {code}")


async def _spawn(command: Sequence[str]) -> Process:
    """A process that a terminal's Ctrl-C does not reach, not even while it has no handler yet."""
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)


def _sweep(parent: Path) -> None:
    """Removes the folders of earlier starts whose processes were both killed."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        # A socket without a lock is a dead runtime's: it takes the lock first.
        with contextlib.suppress(OSError):
            facts = folder.lstat()
            if (
                facts.st_uid != os.getuid()
                or not stat.S_ISDIR(facts.st_mode)
                or not (folder / SOCKET_NAME).exists()
            ):
                continue
            with open(folder / LOCK_NAME, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _hand_over(process: Process, start: Start) -> None:
    """Sends the start line; the pipe stays open, and its end tells the runtime that the frontend is gone."""
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start) + b"\n")


async def _ready_or_dead(process: Process, client: Client, timeout_s: float) -> Ready:
    ready = asyncio.create_task(client.handshake())
    dead = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ready, dead}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        if not dead.done():
            raise RadixKVError(f"the runtime process was not ready within {timeout_s:g} s; start the server again")
        fatal = await _last_word(process)
        if fatal is None:
            raise RadixKVError(f"the runtime process {_ending(dead.result())} before it was ready")
        raise fatal.error()
    finally:
        for task in (ready, dead):
            task.cancel()
        await asyncio.gather(ready, dead, return_exceptions=True)


def _ending(code: int) -> str:
    if code == -signal.SIGBUS:
        return (
            f"ended with code {code} (SIGBUS: a file that it reads became shorter, or its disk failed; do not "
            "write over weights in place, put new ones under another name and rename them)"
        )
    return f"ended with code {code}"


async def _last_word(process: Process) -> Fatal | None:
    """Why a process that has ended says it did."""
    assert process.stdout is not None
    try:
        return msgspec.json.decode(await process.stdout.read(), type=Fatal)
    except msgspec.DecodeError:
        return None


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
    with contextlib.suppress(OSError):
        await process.stdin.wait_closed()
