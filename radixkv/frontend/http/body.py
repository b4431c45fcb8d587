"""Reading of request bodies with limits on size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from radixkv.errors import InvalidRequest, RequestError, UnsupportedFeature
from radixkv.frontend.http.disconnect import ClientDisconnected
from radixkv.frontend.http.errors import BodyTooLarge, BodyTooSlow

RequestT = TypeVar("RequestT")
Parse: TypeAlias = Callable[[bytes, int, dict[str, str]], RequestT]
"""Takes a body, the maximum of tokens in a prompt, and a dictionary for misspelt fields."""

BODY_TIMEOUT_S = 30.0
"""How long a client may take to send a body."""
_MAX_INLINE_BYTES = 1 << 16
"""Up to this many bytes, parse on the event loop. In a thread, the loop can run between the passes over a body."""
MAX_LOGGED_FIELDS = 1000
"""Most misspelt fields that are logged, so that clients cannot fill the log."""
IGNORED_SESSION_HEADERS = frozenset(
    {
        "x-claude-code-session-id",  # Claude Code
        *("session-id", "session_id", "thread-id", "conversation_id"),  # Codex, its older versions too
        "x-session-affinity",  # OpenCode
        "x-litellm-session-id",
        "x-smg-routing-key",  # SGLang's router
    }
)
"""Headers in which agents and routers name a session; they are ignored. Sub-agents and side questions send the
conversation's name, and with that as ``session_id`` each would demote the others' pages."""
UNKNOWN_FIELD_HEADER = "X-RadixKV-Unknown-Field"
_MISSPELT = "misspelt_fields"


def name_misspelt_fields(request: Request, response: Response) -> Response:
    """Returns the response, with a header that names unknown fields of the body one letter from a known one."""
    misspelt: Sequence[str] = request.scope["state"].get(_MISSPELT, ())
    if misspelt:
        response.headers[UNKNOWN_FIELD_HEADER] = ", ".join(misspelt)
    return response


class BodyReader:
    """Reads and parses bodies, until ``refuse`` ends all reading.

    Args:
        max_bytes: the longest body.
        timeout_s: how long a client may take to send a body.
        log: gets one line for each misspelt field, and for the headers of sessions that are ignored, once for each
            name.
    """

    def __init__(
        self, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S, *, log: Callable[[str], None] | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._log = log
        self._logged: set[str] = set()
        self._timeouts: set[asyncio.Timeout] = set()
        self._refusal: RequestError | None = None

    async def read(self, request: Request, parse: Parse[RequestT], max_size: int) -> RequestT:
        """Reads a JSON body and returns ``parse(body, max_size, misspelt)``.

        The fields that ``parse`` adds to ``misspelt`` are logged and kept for ``name_misspelt_fields``.

        Raises:
            InvalidRequest: Content-Type is not JSON. Web pages can send other types without a CORS preflight.
            UnsupportedFeature: the body is compressed.
            BodyTooLarge, BodyTooSlow: the body exceeds a limit.
            ClientDisconnected: the client left before the end of the body.
            RequestError: ``refuse`` was called with it, or ``parse`` raised it.
        """
        self._report_session_headers(request)
        body = await self._read_in_time(request)
        misspelt: dict[str, str] = {}
        try:
            if len(body) <= _MAX_INLINE_BYTES:
                return parse(body, max_size, misspelt)
            return await asyncio.to_thread(parse, body, max_size, misspelt)
        finally:
            if misspelt:
                request.scope["state"][_MISSPELT] = list(misspelt)
                self._report(misspelt)

    def refuse(self, error: RequestError) -> None:
        """Ends running and later reads with ``error``."""
        self._refusal = error
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            timeout.reschedule(now)

    def _report(self, misspelt: Mapping[str, str]) -> None:
        for name in misspelt.keys() - self._logged:
            if self._log is not None and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(name)
                self._log(
                    f"a request has the unknown field {name}, which is ignored; did you mean {misspelt[name]}?"
                )

    def _report_session_headers(self, request: Request) -> None:
        """Logs, once, that the sessions are ignored that a request names in headers of agents and routers."""
        found = IGNORED_SESSION_HEADERS.intersection(request.headers.keys())
        if self._log is not None and found and not found & self._logged:
            self._log(
                f"a request names its session in the header {' and '.join(sorted(found))}, which is ignored: "
                "agents use one session for several conversations; name a single one by X-Session-Id or session_id"
            )
        self._logged |= found

    async def _read_in_time(self, request: Request) -> bytes:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("the body must be JSON, and Content-Type must say so: application/json")
        if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise UnsupportedFeature("a Content-Encoding is not supported in this release; send uncompressed JSON")
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                self._timeouts.add(timeout)
                try:
                    return await self._read(request)
                finally:
                    self._timeouts.discard(timeout)
        except ClientDisconnect:
            raise ClientDisconnected from None
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal.with_traceback(None) from None
            raise BodyTooSlow(f"the body was not complete after {self._timeout_s:g} s") from None

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
