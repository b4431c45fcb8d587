"""Replies that notice when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.errors import RequestError
from radixkv.frontend.http.failure import error_body, error_response

ResultT = TypeVar("ResultT")

DONE_EVENT = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client left before its reply was complete."""


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """A failure in the middle of a stream."""
    return event(error_body(error))


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


class EventStream(Response):
    """Server-sent events. A failure before the first event is a plain error reply; a later one is an event."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until they end or the client leaves."""
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await _send_body(send, first)
            try:
                async for event in events:
                    await _send_body(send, event)
            except RequestError as error:
                await _send_body(send, error_event(error))
        await send({"type": "http.response.body", "body": DONE_EVENT, "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
