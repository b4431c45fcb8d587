"""The reply of an error, also to a client that still sends its body."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.errors import RequestError
from radixkv.frontend.http.connection import CONNECTION, Connection
from radixkv.frontend.http.errors import error_body, status_of

RETRY_AFTER_S = 1
DISCARD_S = 4.0
"""How long the rest of a body is read; less than connections have at the server's end."""
DISCARD_BYTES = 64 << 20

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    503: {"Retry-After": str(RETRY_AFTER_S)},
}


def error_response(error: RequestError) -> Response:
    """The whole reply. A 503 says when to come back; a body that broke a limit ends the connection."""
    status = status_of(error)
    # A 503 before a body has come is of a server that ends, which waits for no upload.
    kind = Response if status == 503 else EarlyReply
    headers = _HEADERS.get(status, {})
    return kind(msgspec.json.encode(error_body(error)), status, headers=headers, media_type="application/json")


class EarlyReply(Response):
    """Sends all of itself; while the body still comes it then reads on, before it ends and perhaps the connection.

    A connection that is closed with bytes unread is reset: clients that look for a reply only once they have sent
    all would never see it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, and throws away what still comes of the body, within limits."""
        connection: Connection = scope["state"][CONNECTION]
        if not connection.is_receiving:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    n_bytes = 0
    while n_bytes <= DISCARD_BYTES:
        message = await receive()
        if not message.get("more_body", False):  # the body has ended, or the client has left
            return
        n_bytes += len(message.get("body", b""))
