"""Who may use the server: those who show its key, or without one the programs of this machine."""

from __future__ import annotations

import hashlib
import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.frontend.http.failure import ForeignCaller, Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Liveness, which needs no key."""


class KeyRequired:
    """Refuses requests without the key, except for liveness.

    Hosts and origins do not matter then: a browser adds no key by itself, and no page of another site knows it.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_shown(Headers(scope=scope)):
            error = Unauthorized("this server needs its key: send the header 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_shown(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests are of one length, so that the time tells nothing of the key's.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


class LocalOnly:
    """Keeps web pages of other sites out: without a key, a browser reaches every local port.

    Refuses requests for another host's name, which DNS can point here, and those of other sites' pages.
    """

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
