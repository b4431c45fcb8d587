"""Keeps web pages of other sites out: the server has no key, and a browser reaches every local port."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.frontend.failure import ForeignCaller, error_response


class LocalOnly:
    """Refuses requests for another host's name, which DNS can point here, and those of other sites' pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 403."""
        if scope["type"] == "http" and (error := _refusal(Headers(scope=scope))) is not None:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refusal(headers: Headers) -> ForeignCaller | None:
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_local(f"//{host}"):
        return ForeignCaller("the Host header names another machine; use localhost or 127.0.0.1")
    if origin is not None:
        return None if _is_local(origin) else ForeignCaller("pages of other sites may not use this server")
    # What a page only loads, such as an image, has no Origin.
    if headers.get("sec-fetch-site") == "cross-site":
        return ForeignCaller("pages of other sites may not use this server")
    return None


def _is_local(url: str) -> bool:
    """Whether a URL's host is this machine."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
