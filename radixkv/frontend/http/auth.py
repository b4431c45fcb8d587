"""Access checks: an API key or, without one, programs of this machine only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import ForbiddenOrigin, Unauthorized

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/ui"})
"""Health checks, and the page that asks for the key: they need none."""


class ApiKeyRequired:
    """Refuses requests without the API key, except those for ``OPEN_PATHS``.

    The key is in ``Authorization: Bearer`` or, as Anthropic's clients send it, in ``x-api-key``.

    It ignores Host and Origin: a browser does not add the key by itself, and pages of other sites do not know it.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on or answers it with 401."""
        needs_key = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if needs_key and (error := self._refusal(Headers(scope=scope))) is not None:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Unauthorized | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        if not key.strip():
            return Unauthorized("this server needs its key: send the header 'Authorization: Bearer KEY'")
        # Digests have equal lengths, so that the time of the comparison does not reveal the key's length.
        if not hmac.compare_digest(_digest(key.strip()), self._digest):
            return Unauthorized("the key of this request is not this server's; send the right one")
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


class LocalOnly:
    """Refuses requests of other sites' web pages, because a browser on this machine reaches every local port.

    Also refuses a Host that is not this machine, because DNS can point a foreign name here.

    Args:
        app: gets the other requests.
        origins: the sites whose pages are allowed. ``*`` is not special: allowing every site would let any page
            that is open in a browser here use the server.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on or answers it with 403."""
        if scope["type"] == "http" and (error := self._refusal(Headers(scope=scope))) is not None:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ForbiddenOrigin | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not _is_local(f"//{host}"):
            return ForbiddenOrigin("the Host header names another machine; use localhost or 127.0.0.1")
        if origin is None:
            # A browser sends no Origin when a page only loads something, such as an image.
            is_foreign = headers.get("sec-fetch-site") == "cross-site"
        else:
            is_foreign = not _is_local(origin) and origin not in self._origins
        if not is_foreign:
            return None
        return ForbiddenOrigin("pages of other sites may not use this server; allow a site with --allowed-origins")


def _is_local(url: str) -> bool:
    """Returns whether a URL's host is this machine."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
