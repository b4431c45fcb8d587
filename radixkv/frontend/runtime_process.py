"""Starts, watches and stops the runtime process."""

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
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec

from radixkv.errors import RadixKVError
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.processes.child_process import ChildProcess
from radixkv.settings.config import EngineConfig
from radixkv.wire.messages import LOCK_NAME, SOCKET_NAME, Fatal, Ready, Start

FOLDER_PREFIX = "radixkv-"
RUNTIME = (sys.executable, "-m", "radixkv.runtime.process")
PREFLIGHT_TIMEOUT_S = 120.0
"""How long the preflight may take to import torch and inspect a GPU."""
START_TIMEOUT_S = 600.0
"""How long a runtime may load its model from disk before it counts as hung."""
STOP_TIMEOUT_S = 8.0
"""How long a drained runtime may take to end before it is killed. It writes pages to disk for up to 5 s."""


class RuntimeProcess:
    """A runtime process that a client is connected to. Use ``start`` to create one."""

    def __init__(
        self,
        process: ChildProcess,
        client: RuntimeClient,
        ready: Ready,
        started_at: float,
        folder: Path,
        name: str,
        cleanup: AsyncExitStack,
    ) -> None:
        self.ready = ready
        self.name = name
        """What errors and the log call the process."""
        self.ready_at = time.monotonic()
        """When it was ready, in monotonic seconds."""
        self.start_s = self.ready_at - started_at
        """How long its start took."""
        self._process = process
        self._client = client
        self._folder = folder
        self._cleanup = cleanup

    @classmethod
    async def start(
        cls,
        engine: EngineConfig,
        checkpoint_folder: Path,
        client: RuntimeClient,
        *,
        tokenizer_folder: Path | None = None,
        first_event_number: int = 0,
        data_parallel_rank: int = 0,
        environment: Mapping[str, str] | None = None,
        name: str = "the runtime process",
        command: Sequence[str] = RUNTIME,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Spawns the process, connects the client and waits until the model is loaded, which takes seconds.

        Args:
            engine: the settings.
            checkpoint_folder: has the model.
            client: is connected to this process, instead of one before.
            tokenizer_folder: has the tokenizer; None: ``checkpoint_folder``.
            first_event_number: number of the first batch of cache events.
            data_parallel_rank: number of the replica.
            environment: the environment variables. None: those of this process.
            name: what errors and the log call the process.
            command: starts the process.
            timeout_s: how long it may take.

        Raises:
            ConfigError, CheckpointError, WireError: the runtime reported this error.
            RadixKVError: the process ended for another reason, or was killed, as it was not ready within
                ``timeout_s``.
        """
        started_at = time.monotonic()
        _remove_stale_folders(Path(tempfile.gettempdir()))
        async with AsyncExitStack() as cleanup:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            socket_path = str(folder / SOCKET_NAME)
            await client.connect(socket_path)
            start = Start(
                engine,
                str(checkpoint_folder),
                socket_path,
                str(tokenizer_folder or checkpoint_folder),
                first_event_number,
                data_parallel_rank,
            )
            process = await _spawn(command, start, environment)
            cleanup.push_async_callback(process.close)
            ready = await _wait_until_ready(process, client, name, timeout_s)
            return cls(process, client, ready, started_at, folder, name, cleanup.pop_all())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def next_event_number(self) -> int | None:
        """Number of the next batch of cache events; None if no batch was published. Read it before ``stop``."""
        try:
            number = (self._folder / LOCK_NAME).read_bytes()
        except FileNotFoundError:
            return None
        return int.from_bytes(number, "big") if number else None

    async def watch(self, heartbeat_timeout_s: float) -> str:
        """Waits until the process dies, or kills it after ``heartbeat_timeout_s`` without a frame.

        Returns the reason, as a clause.
        """
        dead = asyncio.create_task(self._process.wait())
        silence = asyncio.create_task(self._wait_for_silence(heartbeat_timeout_s))
        try:
            await asyncio.wait({dead, silence}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                reason = f"{self.name} {_exit_text(dead.result())}"
                if (fatal := await _read_fatal(self._process)) is not None:
                    reason += f": {fatal.text}"
            else:
                reason = f"{self.name} was silent for {heartbeat_timeout_s:g} s and was killed"
                self.kill()
                await dead
        finally:
            dead.cancel()
            silence.cancel()
        return reason

    def kill(self) -> None:
        """Kills the process in the middle of its work; ``stop`` must follow."""
        self._process.kill()

    async def stop(self) -> None:
        """Ends the process: by a drain if it is idle, by a kill otherwise. The client stays open."""
        if self._process.return_code is None and self._client.n_in_flight == 0:
            self._client.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        await self._cleanup.aclose()

    async def _wait_for_silence(self, limit_s: float) -> None:
        """Returns once no frame has come for ``limit_s``.

        Sums short waits instead of reading the clock: a frontend that was itself suspended must not count that time
        against the runtime.
        """
        wait_s = min(0.5, limit_s / 10)
        silent_s, seen = 0.0, -1
        while silent_s < limit_s:
            await asyncio.sleep(wait_s)
            silent_s = silent_s + wait_s if seen == self._client.n_frames else 0.0
            seen = self._client.n_frames


async def preflight(
    engine: EngineConfig,
    checkpoint_folder: Path,
    *,
    data_parallel_size: int = 1,
    command: Sequence[str] = (*RUNTIME, "--check"),
    timeout_s: float = PREFLIGHT_TIMEOUT_S,
) -> None:
    """Checks in a process with torch whether settings, machine and ``config.json`` fit. Takes seconds.

    Args:
        engine: the settings.
        checkpoint_folder: may lack the weights.
        data_parallel_size: runtimes for which there must be GPUs.
        command: starts the process.
        timeout_s: the longest that the process may take.

    Raises:
        ConfigError, CheckpointError: they do not fit.
        RadixKVError: the process failed, or took longer than ``timeout_s``.
    """
    async with AsyncExitStack() as cleanup:
        start = Start(engine, str(checkpoint_folder), socket_path="", data_parallel_size=data_parallel_size)
        process = await _spawn(command, start)
        cleanup.push_async_callback(process.close)
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise RadixKVError(
                f"looking at the machine took longer than {timeout_s:g} s; start the server again"
            ) from None
        if (fatal := await _read_fatal(process)) is not None:
            raise fatal.error()
        if code != 0:
            raise RadixKVError(f"the process that looks at the machine ended with code {code}")


async def _spawn(
    command: Sequence[str], start: Start, environment: Mapping[str, str] | None = None
) -> ChildProcess:
    """Spawns a process and sends it the start line. The pipe stays open: its end says that the frontend is gone."""
    process = await ChildProcess.start(command, environment=environment)
    process.send_line(msgspec.json.encode(start))
    return process


def _remove_stale_folders(parent: Path) -> None:
    """Removes the socket folders of earlier servers of which both processes were killed.

    Such a folder holds a socket and its lock, nothing else. Whatever differs was not made by a server and stays: a
    folder with another file, a symbolic link, a file of another user.
    """
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        socket_path, lock_path = folder / SOCKET_NAME, folder / LOCK_NAME
        with contextlib.suppress(OSError):
            is_ours = (
                _is_own(folder, stat.S_IFDIR)
                and set(folder.iterdir()) == {socket_path, lock_path}
                and _is_own(socket_path, stat.S_IFSOCK)
                and _is_own(lock_path, stat.S_IFREG)
            )
            if not is_ours:
                continue
            # A socket whose lock is free belongs to a dead runtime: a runtime takes the lock first.
            with open(lock_path, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                socket_path.unlink()
                lock_path.unlink()
                folder.rmdir()


def _is_own(path: Path, kind: int) -> bool:
    """Returns whether a path, links not followed, is this user's and of this kind (of ``stat.S_IFMT``)."""
    status = path.lstat()
    return status.st_uid == os.getuid() and stat.S_IFMT(status.st_mode) == kind


async def _wait_until_ready(process: ChildProcess, client: RuntimeClient, name: str, timeout_s: float) -> Ready:
    ready = asyncio.create_task(client.handshake())
    dead = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ready, dead}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        if not dead.done():
            raise RadixKVError(f"{name} was not ready within {timeout_s:g} s; start the server again")
        fatal = await _read_fatal(process)
        if fatal is None:
            raise RadixKVError(f"{name} {_exit_text(dead.result())} before it was ready")
        raise fatal.error()
    finally:
        for task in (ready, dead):
            task.cancel()
        await asyncio.gather(ready, dead, return_exceptions=True)


def _exit_text(code: int) -> str:
    if code == -signal.SIGBUS:
        return (
            f"ended with code {code} (SIGBUS: a file that it reads became shorter, or its disk failed; do not "
            "write over weights in place, put new ones under another name and rename them)"
        )
    return f"ended with code {code}"


async def _read_fatal(process: ChildProcess) -> Fatal | None:
    """Returns the error that a process reported before it ended, if any."""
    try:
        return msgspec.json.decode(await process.read(), type=Fatal)
    except msgspec.DecodeError:
        return None
