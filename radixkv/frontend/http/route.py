"""Construction of plain Starlette routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def route(path: str, endpoint: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
    """Returns a Starlette route for exactly these methods.

    FastAPI's own routes add 0.06 ms per request for decoding, which msgspec does here (decision 12).
    """
    result = Route(path, endpoint, methods=methods)
    result.methods = set(methods)  # Starlette adds HEAD to GET, and some GET routes here have effects
    return result
