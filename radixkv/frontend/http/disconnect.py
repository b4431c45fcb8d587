"""Cancellation of work whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientDisconnected(Exception):
    """The client disconnected before its response was complete."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Returns the result of ``work``; cancels it and raises ``ClientDisconnected`` if the client leaves first.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
