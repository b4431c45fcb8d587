"""Work that takes long, and much memory meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Alone:
    """Runs work in threads, one piece at a time, whether or not those who asked for it still wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What ``work`` gives, or raises. Work that has not begun when its caller is cancelled never does."""
        await self._lock.acquire()
        # Nothing ends a thread: that of a caller who left goes on, and the next piece waits for it.
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(running)
