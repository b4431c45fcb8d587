"""Count of an event loop's turns while other work is done beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def turns_during(work: Coroutine[Any, Any, object]) -> int:
    """Runs the work as a task, and returns how often another task ran meanwhile.

    Work inside the loop lets the other task run a few times, however long it takes. Work in a thread lets it run
    as often as the thread yields the interpreter.
    """
    return asyncio.run(_count_turns(work))


async def _count_turns(work: Coroutine[Any, Any, object]) -> int:
    doing = asyncio.create_task(work)
    count = 0
    while not doing.done():
        await asyncio.sleep(0.001)
        count += 1
    await doing
    return count
