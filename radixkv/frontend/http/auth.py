"""Who may use the server: those who show its key, or without one the programs of this machine."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import ForeignCaller, Unauthorized

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

    Args:
        origins: of the sites whose pages are let in. There is none for all: every page that is looked at on this
            machine could then use the server.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with 403."""
        if scope["type"] == "http" and (error := self._refusal(Headers(scope=scope))) is not None:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ForeignCaller | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not _is_local(f"//{host}"):
            return ForeignCaller("the Host header names another machine; use localhost or 127.0.0.1")
        if origin is None:
            # What a page only loads, such as an image, has no Origin.
            is_foreign = headers.get("sec-fetch-site") == "cross-site"
        else:
            is_foreign = not _is_local(origin) and origin not in self._origins
        if not is_foreign:
            return None
        return ForeignCaller("pages of other sites may not use this server, but for those of --allowed-origins")


def _is_local(url: str) -> bool:
    """Whether a URL's host is this machine."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
