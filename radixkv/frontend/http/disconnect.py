"""Work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client left before its reply was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``, which is cancelled when the client leaves.

    The request's body must have been read. Raises ``ClientGone``, or what ``work`` raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
