"""A runtime in a thread, and a client of it in this one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.runtime.process import RuntimeServer, open_socket
from support.live import LIMIT_S


def run(
    path: Path,
    loop: Any,
    test: Callable[[RuntimeClient, RuntimeServer], Awaitable[None]],
    metrics: Metrics | None = None,
    **settings: Any,
) -> None:
    """Runs ``test`` with a client that has these settings, and a runtime around ``loop``."""

    async def limited() -> None:
        client = RuntimeClient(metrics or Metrics(), **settings)
        await client.connect(str(path / "r.sock"))
        try:
            async with asyncio.timeout(LIMIT_S):
                await client.handshake()
                await test(client, server)
        finally:
            client.drain()
            await asyncio.to_thread(thread.join, LIMIT_S)
            await client.close()

    with open_socket(path / "r.sock") as socket:
        server = RuntimeServer(socket, loop)
        thread = threading.Thread(target=server.run)
        thread.start()
        asyncio.run(limited())
        assert not thread.is_alive()
