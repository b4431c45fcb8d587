"""The HTTP/1.1 protocol of the server's connections, with a deadline for requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import msgspec
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body import BODY_TIMEOUT_S
from radixkv.frontend.http.errors import error_body
from radixkv.frontend.http.request_ids import id_headers

CONNECTION = "connection"
"""Key of the connection in a request's ``state``."""
REQUEST_TIMEOUT_S = BODY_TIMEOUT_S + 10.0
"""How long a request's head and body may take to arrive, from the opening of the connection or its first byte."""
HALF_CLOSED_CHECK_S = 0.25
"""How often a half-closed connection is checked for a client that has left."""
LAST_READ_S = 0.05
"""Wait between the keep-alive timeout and the close of a connection, so that the event loop reads once more."""
_TCP_CLOSE = 7
"""Linux's number of the TCP state after a reset."""


class Connection(H11Protocol):
    """uvicorn's h11 protocol, changed in five ways.

    It closes a connection whose request is not complete in time, even if no handler reads the body. It answers
    bytes that are not HTTP with the JSON of an error. It completes the response to a client that has closed only
    its own side. It can write parts of a stream directly, because h11 and the layers of the app cost as much as
    all other work on sending a part (decision 21), and several writes together, because each is a system call. It
    does not close an idle connection on which a request has just arrived.
    """

    limit_s = REQUEST_TIMEOUT_S
    """The deadline of a request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictFraming(h11.SERVER)
        self._writes: _GatheringTransport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the deadline."""
        self._writes = _GatheringTransport(transport)
        super().connection_made(self._writes)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Starts the deadline at the first byte of a request and cancels it at the last."""
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the deadline."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps a connection whose client has closed its side after a whole request, until the response ends.

        A client that has left looks the same until something is sent to it: then its machine resets the connection.
        So this sends ``100 Continue``, which clients skip. HTTP/1.0 has no such response, and its clients count as
        gone.
        """
        is_responding = (
            self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
            and self.conn.their_http_version == b"1.1"
        )
        if is_responding:
            self.cycle.keep_alive = False
            if self.conn.our_state is h11.SEND_RESPONSE:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.transport.write(self.conn.send(interim))
            self._close_after_reset()
        return is_responding

    def timeout_keep_alive_handler(self) -> None:
        """Closes the connection, unless the event loop finds a request when it next reads.

        A process that was stopped, as by ``SIGSTOP``, continues with the timers that are due, and only then reads
        what has arrived meanwhile.
        """
        self.timeout_keep_alive_task = self.loop.call_later(LAST_READ_S, super().timeout_keep_alive_handler)

    @property
    def is_full(self) -> bool:
        """Whether the write buffer is above its limit, so that ``drain`` would wait."""
        return self.flow.write_paused

    @property
    def is_receiving(self) -> bool:
        """Whether the client is still sending the request's body."""
        return self.conn.their_state is h11.SEND_BODY

    def write_part(self, part: bytes) -> None:
        """Writes the next part of a response without Content-Length; does nothing if the client has left."""
        if self.transport.is_closing():
            return
        if self.conn.their_http_version == b"1.0":
            self.transport.write(part)
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    @contextlib.contextmanager
    def one_write(self) -> Iterator[None]:
        """Context whose writes are sent together at its end."""
        assert self._writes is not None, "a response has a connection"
        self._writes.gather()
        try:
            yield
        finally:
            self._writes.release()

    async def drain(self) -> None:
        """Waits until the client has read most of the write buffer."""
        await self.flow.drain()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request with 400, unless a response has begun, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            scope: Any = {"path": "", "headers": ()}
            if self.conn.our_state is h11.SEND_RESPONSE and self.cycle is not None:  # only the body is wrong
                scope = self.cycle.scope
            error = InvalidRequest("this is not a valid HTTP/1.1 request; send one")
            body = msgspec.json.encode(error_body(error, scope["path"]))
            response = Response(body, media_type="application/json")
            headers = [*response.raw_headers, (b"connection", b"close"), *id_headers(scope)]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # a handler that still reads the body, or answers, finds the client gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _close_after_reset(self) -> None:
        """Closes the connection once it was reset, which the event loop notices only at the next write."""
        if self.transport.is_closing():
            return
        state = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state[0] == _TCP_CLOSE:
            self.transport.close()
        else:
            self.loop.call_later(HALF_CLOSED_CHECK_S, self._close_after_reset)

    def _set_deadline(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limit_s, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _GatheringTransport(asyncio.Transport):
    """A transport that can gather what is written. Its other methods are those that uvicorn calls."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._gathered: list[bytes] | None = None
        """What was written since ``gather``; None outside of it."""

    def gather(self) -> None:
        """Keeps what is written until ``release``."""
        self._gathered = []

    def release(self) -> None:
        """Writes what was kept, and keeps nothing more."""
        gathered, self._gathered = self._gathered, None
        if gathered:
            self._transport.write(b"".join(gathered))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._gathered is None:
            self._transport.write(data)
        else:
            self._gathered.append(bytes(data))

    def close(self) -> None:
        self.release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


class _StrictFraming(h11.Connection):
    """h11's connection, which also refuses a request with two lengths.

    A proxy may believe the other one and take a part of the body for the next request: request smuggling.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns the next event. Raises ``h11.RemoteProtocolError`` for bytes that are not HTTP/1.1."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if names >= {b"content-length", b"transfer-encoding"}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event
