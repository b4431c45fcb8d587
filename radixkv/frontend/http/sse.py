"""Streams of server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.errors import RequestError
from radixkv.frontend.http.connection import CONNECTION, Connection
from radixkv.frontend.http.disconnect import ClientDisconnected, cancel_on_disconnect
from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import error_body

EVENT_START, EVENT_END = b"data: ", b"\n\n"
DONE_EVENT = EVENT_START + b"[DONE]" + EVENT_END


def event(data: dict[str, Any]) -> bytes:
    """Encodes one server-sent event."""
    return EVENT_START + msgspec.json.encode(data) + EVENT_END


def typed_event(data: dict[str, Any]) -> bytes:
    """Encodes an event whose name is the ``type`` of its data."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\n" + event(data)


def error_event(error: RequestError, path: str) -> bytes:
    """Encodes an error in the middle of a stream. Clients find one with a ``type`` by the name of its event."""
    body = error_body(error, path)
    return typed_event(body) if "type" in body else event(body)


class EventStream(Response):
    """A stream of events. An error before the first event gives a plain error response, a later one an event.

    Args:
        events: the encoded events.
        end: what follows the last event.
        write_directly: gets the connection once it has the first event. From then on it may write events to it
            while ``events`` waits. None: all events come from ``events``.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: bytes = DONE_EVENT,
        write_directly: Callable[[Connection], None] | None = None,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._write_directly = write_directly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until they end or the client leaves."""
        with contextlib.suppress(ClientDisconnected):
            await cancel_on_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except RequestError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            connection: Connection = scope["state"][CONNECTION]
            with connection.one_write():
                await send(start)
                connection.write_part(first)
            try:
                # Take an event only when the connection has room. Unread output waits in the runtime client, which
                # limits it.
                await connection.drain()
                if self._write_directly is not None:
                    self._write_directly(connection)
                async for encoded in events:
                    connection.write_part(encoded)
                    if connection.is_full:
                        await connection.drain()
            except RequestError as error:
                connection.write_part(error_event(error, scope["path"]))
        with connection.one_write():
            await send({"type": "http.response.body", "body": self._end, "more_body": False})
