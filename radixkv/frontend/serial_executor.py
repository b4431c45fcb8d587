"""Long work that needs much memory, run one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class SerialExecutor:
    """Runs work in threads, one call at a time, even if the caller no longer waits for the running one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns or raises what ``work`` does. Work whose caller is cancelled before it starts never starts."""
        await self._lock.acquire()
        # A thread cannot be ended: after its caller has left it continues, and the next call waits for it.
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(running)
