"""HTTP connections whose requests must come in time, and whose every refusal has the shape of errors."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body import BODY_S
from radixkv.frontend.http.errors import error_body

CONNECTION = "connection"
"""Of a request's state, the connection that it came by."""
REQUEST_S = BODY_S + 10.0
"""How long a request may take to come, head and body, from the connection's start or its own first byte."""


class Connection(H11Protocol):
    """Closes a connection whose request does not come whole in time, whether or not anybody reads it.

    Replies of many small parts are written past h11 and the layers of the app, which take longer than all else that
    is done for a part.
    """

    limit_s = REQUEST_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Starts the clock with the first byte of a request, and stops it with the last."""
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        super().connection_lost(exc)
        self._stop_clock()

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the client to read it that ``drain`` would wait."""
        return self.flow.write_paused

    @property
    def is_receiving(self) -> bool:
        """Whether more of the request is to come."""
        return self.conn.their_state is h11.SEND_BODY

    def write_part(self, part: bytes) -> None:
        """Sends the next part of a reply whose head told no length; nothing if the client has left."""
        if self.transport.is_closing():
            return
        if self.conn.their_http_version == b"1.0":
            self.transport.write(part)
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client has read most of what was written."""
        await self.flow.drain()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP request, and closes; a reply that has begun just ends."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = InvalidRequest("this is not an HTTP/1.1 request; send one")
            reply = Response(msgspec.json.encode(error_body(error)), media_type="application/json")
            headers = [*reply.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(reply.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_clock()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limit_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
