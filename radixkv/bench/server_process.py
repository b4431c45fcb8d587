"""A server that a run starts for itself and stops again."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import IO

import httpx

from radixkv.errors import RadixKVError

START_LIMIT_S = 900.0
"""A checkpoint may have to be downloaded first."""
STOP_LIMIT_S = 20.0

HEAD_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
"""Of a server's log: where its address stands, and what its last line is taken from."""

_ADDRESS = re.compile(rb"http://127\.0\.0\.1:[1-9]\d*(?=\D)")


class ServerFailed(RadixKVError):
    """The server that was started is not there, or is no more."""


@asynccontextmanager
async def started_server(flags: Sequence[str], *, start_limit_s: float = START_LIMIT_S) -> AsyncIterator[str]:
    """Runs ``radixkv serve`` with these flags on a free port of this machine; yields its address once it is ready.

    On the way out the server is stopped, by force if it takes longer than ``STOP_LIMIT_S``; if this process is
    killed, the server ends too. Must be used in the main thread, whose end the kernel takes for the process's.

    Raises:
        ServerFailed: it ended, or was not ready in time; with the last line that it wrote.
    """
    python = [sys.executable, "-m"]
    serve = [*python, "radixkv.cli", "serve", *flags, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*python, "radixkv.bench.parent_death", str(os.getpid()), *serve],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the server in order
        )
        try:
            yield await _ready(process, log, start_limit_s)
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with status {process.returncode}: {_last_line(log)}")
        finally:
            _stop(process)


async def _ready(process: subprocess.Popen[bytes], log: IO[bytes], limit: float) -> str:
    deadline = time.monotonic() + limit
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended before it was ready: {_last_line(log)}")
            found = _ADDRESS.search(_written(log, 0, HEAD_BYTES))
            if found and await _healthy(client, found[0].decode()):
                return found[0].decode()
            await asyncio.sleep(0.05)
    raise ServerFailed(f"the server was not ready within {limit:g} s: {_last_line(log)}")


async def _healthy(client: httpx.AsyncClient, address: str) -> bool:
    try:
        return (await client.get(f"{address}/health")).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: IO[bytes]) -> str:
    begin = max(os.fstat(log.fileno()).st_size - TAIL_BYTES, 0)
    lines = _written(log, begin, TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _written(log: IO[bytes], begin: int, size: int) -> bytes:
    return os.pread(log.fileno(), size, begin)  # the server appends at the shared offset, which must not move
