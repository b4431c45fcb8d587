"""Awaits calls that block, and may do so for long, without keeping the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(call: Callable[[], _T], name: str) -> _T:
    """Awaits a blocking call in a thread of its own, which nobody waits for if this is cancelled.

    Threads of a pool would keep the process from ending while a call hangs.

    Args:
        call: what blocks.
        name: the thread's.
    """
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
