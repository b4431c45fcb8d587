"""Real runtime processes around a scripted loop, and the clients of them."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.settings.config import EngineConfig
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.sampling import SamplingParams
from support import scripted_runtime as scripted

ENGINE = EngineConfig()
NOWHERE = Path("/nowhere")
SCRIPT = scripted.__file__
ENDLESS = 1_000_000
"""Tokens of an answer that outlasts a test, at a hundredth of a second or more each."""


def command(step_s: float = 0.01, *flags: str) -> list[str]:
    """Returns the command of a scripted runtime, of which these fields are true."""
    return [sys.executable, SCRIPT, str(step_s), *flags]


def changed(body: str) -> list[str]:
    """Returns the command of a runtime whose ``ready`` has another body, which runs during its start."""
    source = f"""
import sys
sys.path.insert(0, {str(Path(SCRIPT).parents[1])!r})
from radixkv import errors
from support import scripted_runtime as scripted
class Loop(scripted.ScriptedLoop):
    @property
    def ready(self):
        {body}
sys.exit(scripted.run_as_process(Loop()))
"""
    return [sys.executable, "-c", source]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def connecting() -> AsyncIterator[RuntimeClient]:
    """Yields a client that no runtime is connected to yet."""
    client = RuntimeClient(Metrics())
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def started(command: list[str]) -> AsyncIterator[tuple[RuntimeProcess, RuntimeClient]]:
    async with connecting() as client:
        runtime = await RuntimeProcess.start(ENGINE, NOWHERE, client, command=command)
        try:
            yield runtime, client
        finally:
            await runtime.stop()


async def answer(client: EngineClient, ids: list[int], n: int) -> bytes:
    """Returns the tokens of an answer. Raises ``RequestError``."""
    prompt = Submit(uuid.uuid4().hex, pack_tokens(ids), SamplingParams(max_tokens=n))
    tokens = b""
    async with client.submit([prompt], arrived=Arrival(time.monotonic())) as group:
        async for delta in group.deltas():
            tokens += delta.tokens
    return tokens
