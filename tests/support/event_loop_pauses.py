"""How long an event loop stands still while other work is done beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

ATTEMPTS = 5


def least_pause(work: Callable[[], Coroutine[Any, Any, object]], *, enough: float) -> float:
    """The loop's longest pause as a part of the time that the work takes, at best.

    A busy machine makes pauses longer now and then, work in the loop every time: it is done again, a few times,
    until a pause is below ``enough``.
    """
    least = 1.0
    for _ in range(ATTEMPTS):
        least = min(least, asyncio.run(_longest_pause(work())))
        if least < enough:
            break
    return least


async def _longest_pause(work: Coroutine[Any, Any, object]) -> float:
    begun = last = time.perf_counter()
    doing = asyncio.create_task(work)
    longest = 0.0
    while not doing.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await doing
    return longest / (last - begun)
