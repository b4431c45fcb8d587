"""Replies to requests whose body was not read to its end."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DISCARD_S = 4.0
"""How long the rest of a body is read; less than connections have at the server's end."""
DISCARD_BYTES = 64 << 20


class EarlyReply(Response):
    """Sends all of itself, then reads on for a while before it ends, which may close the connection.

    A connection that is closed with bytes unread is reset: clients that look for a reply only once they have sent
    all would never see it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, and throws away what still comes of the body, within limits."""
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
