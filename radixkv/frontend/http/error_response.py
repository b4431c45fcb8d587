"""Error responses, also to clients that are still sending their bodies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.errors import RequestError
from radixkv.frontend.http.connection import CONNECTION, Connection
from radixkv.frontend.http.errors import RuntimeRestarting, error_body, status_of

RETRY_AFTER_S = 1
"""Value of Retry-After in a 503, unless a runtime that is started again takes longer."""
MAX_RETRY_AFTER_S = 60
"""Clients of OpenAI ignore a Retry-After above this."""
DISCARD_TIMEOUT_S = 4.0
"""How long the rest of a body is read; less than the server gives connections when it shuts down."""
MAX_DISCARD_BYTES = 64 << 20
"""How much of the rest of a body is read."""

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
}


def error_response(error: RequestError, path: str) -> Response:
    """Returns the response to an error of a request for ``path``.

    A 503 has Retry-After; a body beyond a limit closes the connection.
    """
    status = status_of(error)
    # A 503 before the body has arrived comes from a server that shuts down, which does not wait for uploads.
    kind = Response if status == 503 else EarlyResponse
    headers = retry_after(error) if status == 503 else _HEADERS.get(status, {})
    body = msgspec.json.encode(error_body(error, path))
    return kind(body, status, headers=headers, media_type="application/json")


def retry_after(error: RequestError) -> dict[str, str]:
    """Returns the header of a 503 that says when to try again."""
    left_s = error.ready_at - time.monotonic() if isinstance(error, RuntimeRestarting) else 0.0
    return {"Retry-After": str(min(max(RETRY_AFTER_S, math.ceil(left_s)), MAX_RETRY_AFTER_S))}


class EarlyResponse(Response):
    """A response that is sent while the request's body may still arrive.

    It reads the rest of the body before it ends, because closing a connection with unread bytes resets it: a client
    that reads the response only after sending everything would never see it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response and discards the rest of the body, within limits."""
        connection: Connection = scope["state"][CONNECTION]
        if not connection.is_receiving:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    n_bytes = 0
    while n_bytes <= MAX_DISCARD_BYTES:
        message = await receive()
        if not message.get("more_body", False):  # the body has ended, or the client has left
            return
        n_bytes += len(message.get("body", b""))
