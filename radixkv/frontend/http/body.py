"""Request bodies, read with limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from radixkv.errors import InvalidRequest, RequestError, UnsupportedFeature
from radixkv.frontend.http.disconnect import ClientGone
from radixkv.frontend.http.errors import BodyTooLarge, BodyTooSlow

RequestT = TypeVar("RequestT")

BODY_S = 30.0
"""How long a client may take to send a body."""
_INLINE_BYTES = 1 << 16
"""Longer bodies are parsed in a thread, so that the event loop goes on between the passes over them."""


class Bodies:
    """Reads them, and can end all reading at once.

    Args:
        max_bytes: the longest body.
        limit_s: the longest that one may take.
    """

    def __init__(self, max_bytes: int, limit_s: float = BODY_S) -> None:
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._limits: set[asyncio.Timeout] = set()
        self._refusal: RequestError | None = None

    async def read(self, request: Request, parse: Callable[[bytes, int], RequestT], most: int) -> RequestT:
        """What ``parse`` makes of the body of a request that says it is JSON; ``most`` is given to it.

        Raises:
            InvalidRequest: it says it is something else. Web pages can send that without asking first.
            UnsupportedFeature: it is compressed.
            BodyTooLarge, BodyTooSlow: it passes a limit.
            ClientGone: the client left before its end.
            RequestError: the ``refuse`` that came, or what ``parse`` raises.
        """
        body = await self._read_in_time(request)
        if len(body) <= _INLINE_BYTES:
            return parse(body, most)
        return await asyncio.to_thread(parse, body, most)

    def refuse(self, error: RequestError) -> None:
        """From now on all reading ends with an error, also what has begun."""
        self._refusal = error
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    async def _read_in_time(self, request: Request) -> bytes:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("the body must be JSON, and Content-Type must say so: application/json")
        if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise UnsupportedFeature("a Content-Encoding is not supported in this release; send the JSON as it is")
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                self._limits.add(limit)
                try:
                    return await self._read(request)
                finally:
                    self._limits.discard(limit)
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal.with_traceback(None) from None
            raise BodyTooSlow(f"the body was not complete after {self._limit_s:g} s") from None

    async def _read(self, request: Request) -> bytes:
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is longer than {self._max_bytes} bytes; send less, or start the server with a greater "
            "--max-body-bytes"
        )
