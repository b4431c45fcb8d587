"""A ``radixkv serve`` process that lives as long as a block of code."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import IO

from radixkv.client.errors import BadReply
from radixkv.client.http import HTTPClient
from radixkv.errors import RadixKVError
from radixkv.processes.child_process import ChildProcess
from radixkv.settings.client_flags import KEY_VARIABLE
from radixkv.terminal import Progress

START_LIMIT_S = 900.0
"""Time limit of a server's start; it may have to download a checkpoint."""
STOP_LIMIT_S = 20.0
"""Time limit of a server's orderly stop."""
PROBE_LIMIT_S = 5.0
"""Time limit of one question whether the server is ready."""

HEAD_BYTES = 1 << 20
"""Bytes at the beginning of the server's log that are searched for its address."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of the server's log that are searched for its last line."""

_ADDRESS = re.compile(rb"radixkv ready on (http://\S+:[1-9]\d*) ")


class ServerFailed(RadixKVError):
    """The server process did not become ready, or ended."""


@asynccontextmanager
async def running_server(
    flags: Sequence[str],
    *,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] = MappingProxyType({}),
    start_limit_s: float = START_LIMIT_S,
) -> AsyncIterator[str]:
    """Runs ``radixkv serve`` with these flags on a free port and yields its address once it is ready.

    Stops the server on exit, and kills it if that takes longer than ``STOP_LIMIT_S``. The server also ends if this
    process is killed. The starting thread must live as long as the server: the kernel ends it with that thread.

    Args:
        flags: all but ``--host`` and ``--port``.
        host: the address to listen on.
        environment: variables beside those of this process, of which ``RADIXKV_API_KEY`` is left out.
        start_limit_s: limit of the time until it is ready.

    Raises:
        ServerFailed: the server ended, or was not ready in time; the text has the last line of its log.
    """
    serve = [sys.executable, "-m", "radixkv.cli", "serve", *flags, "--host", host, "--port", "0"]
    with tempfile.TemporaryFile() as log:
        # A key in the environment is that of another server, which this process may measure or be.
        ours = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        variables = {**ours, **environment, "PYTHONUNBUFFERED": "1"}
        process = await ChildProcess.start(serve, output=log, environment=variables)
        try:
            with Progress("starting the server") as progress:
                address = await _wait_until_ready(process, log, start_limit_s, progress)
            yield address
            if process.return_code is not None:
                raise ServerFailed(f"the server ended with status {process.return_code}: {_last_line(log)}")
        finally:
            with Progress("stopping the server"):
                await process.stop(STOP_LIMIT_S)


async def _wait_until_ready(process: ChildProcess, log: IO[bytes], limit_s: float, progress: Progress) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.return_code is not None:
            raise ServerFailed(f"the server ended before it was ready: {_last_line(log)}")
        match = _ADDRESS.search(_read_log(log, 0, HEAD_BYTES))
        if match and await _is_healthy(match[1].decode()):
            return match[1].decode()
        progress.show(_last_line(log, "").removeprefix("radixkv: "))
        await asyncio.sleep(0.05)
    raise ServerFailed(f"the server was not ready within {limit_s:g} s: {_last_line(log)}")


async def _is_healthy(address: str) -> bool:
    async with HTTPClient(address) as client:
        try:
            await client.request("GET", "/health", limit_s=PROBE_LIMIT_S)
        except BadReply:
            return False
    return True


def _last_line(log: IO[bytes], if_empty: str = "it wrote nothing") -> str:
    offset = max(os.fstat(log.fileno()).st_size - TAIL_BYTES, 0)
    lines = _read_log(log, offset, TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else if_empty


def _read_log(log: IO[bytes], offset: int, size: int) -> bytes:
    # pread leaves the file offset alone: the server shares it and appends there.
    return os.pread(log.fileno(), size, offset)
