"""The header ``X-Request-Id`` of requests and of all responses."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.frontend.arrival import set_request_id
from radixkv.frontend.http.errors import is_anthropic

REQUEST_ID_HEADER = "X-Request-Id"
_NAME = REQUEST_ID_HEADER.lower().encode()
_ANTHROPIC_NAME = b"request-id"
"""The header in which Anthropic's clients look for the id."""


def id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Notes the id of a request, its own or a new one. Returns the headers of the response that have it."""
    given = next((value for name, value in scope["headers"] if name == _NAME), b"")
    request_id = set_request_id(scope, given)
    names = (_NAME, _ANTHROPIC_NAME) if is_anthropic(scope["path"]) else (_NAME,)
    return [(name, request_id) for name in names]


class RequestIds:
    """Gives each request an id, its own ``X-Request-Id`` or a new one, and the id to its response.

    Args:
        app: gets all requests. It must be the whole app with what renders its errors, so that every response has an
            id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and its response back with the id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = id_headers(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)
