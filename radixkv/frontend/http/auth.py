"""Access checks: an API key or, without one, programs of this machine only."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.errors import InvalidRequest
from radixkv.frontend.arrival import set_tenant
from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import ForbiddenOrigin, OperatorOnly, Unauthorized
from radixkv.settings.tenants import OPERATOR

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/ui"})
"""Paths that need no key: health checks, and ``/ui``, which asks for the key itself, with what leads to it."""
ADAPTER_PATHS = frozenset(
    {"/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
OPERATOR_PATHS = frozenset(
    {
        *ADAPTER_PATHS,
        "/cache/doctor",
        "/cache/tables",
        "/cache/tree",
        "/cache/tree/events",
        "/flush_cache",
        "/get_server_info",
        "/health_generate",
        "/metrics",
        "/reset_prefix_cache",
        "/server_info",
        "/v1/loads",
    }
)
"""Paths that show or change what belongs to all tenants; only the operator's key may use them."""


CHANGING_PATHS = frozenset(
    {*ADAPTER_PATHS, "/cache/invalidate", "/cache/pin", "/flush_cache", "/reset_prefix_cache"}
)
"""Paths, beside ``SESSIONS``, that change the cache or the adapters. A browser sends such a request for any page
unasked."""
SESSIONS = "/sessions/"


class ApiKeyRequired:
    """Refuses requests without an API key, except those for ``OPEN_PATHS``, and notes whose key it is.

    The key is in ``Authorization: Bearer`` or, as Anthropic's clients send it, in ``x-api-key``.

    It ignores Host and Origin: a browser does not add the key by itself, and pages of other sites do not know it.

    Args:
        app: gets the other requests.
        key: the server's key, with tenants the operator's; None for none.
        tenant_keys: by key, the name of the tenant that has it. Tenants may not use ``OPERATOR_PATHS``.
    """

    def __init__(self, app: ASGIApp, key: str | None, tenant_keys: Mapping[str, str]) -> None:
        self._app = app
        # A look-up among digests takes as long for a key that is nearly right as for any other.
        self._tenants = {_digest(key): name for key, name in tenant_keys.items()}
        if key is not None:
            self._tenants[_digest(key)] = OPERATOR

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on or answers it with 401 or 403."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            tenant = self._tenant(Headers(scope=scope), scope["path"])
            if isinstance(tenant, InvalidRequest):
                await error_response(tenant, scope["path"])(scope, receive, send)
                return
            set_tenant(scope, tenant)
        await self._app(scope, receive, send)

    def _tenant(self, headers: Headers, path: str) -> str | Unauthorized | OperatorOnly:
        """Returns the tenant that sends a request, or why it is refused."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        if not key.strip():
            return Unauthorized("this server needs its key: send the header 'Authorization: Bearer KEY'")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            return Unauthorized("the key of this request is not this server's; send the right one")
        if tenant != OPERATOR and path in OPERATOR_PATHS:
            return OperatorOnly("this path is for the server's operator: it needs the key of --api-key")
        return tenant


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        error = foreign_refusal(headers, self._origins)
        if error is None and (path in CHANGING_PATHS or path.startswith(SESSIONS)):
            error = other_origin_refusal(headers, self._origins)
        if error is not None:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def foreign_refusal(headers: Headers, origins: Collection[str]) -> ForbiddenOrigin | None:
    """Returns the error of a request that is for another machine, or of a page of a site not in ``origins``."""
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_local(f"//{host}"):
        return ForbiddenOrigin("the Host header names another machine; use localhost or 127.0.0.1")
    if origin is None:
        # A browser sends no Origin when a page only loads something, such as an image.
        is_foreign = headers.get("sec-fetch-site") == "cross-site"
    else:
        is_foreign = not _is_local(origin) and origin not in origins
    if not is_foreign:
        return None
    return ForbiddenOrigin("pages of other sites may not use this server; allow a site with --allowed-origins")


def other_origin_refusal(headers: Headers, origins: Collection[str]) -> ForbiddenOrigin | None:
    """Returns the error of a request of any page but this server's own and those of sites in ``origins``.

    A page of another port of this machine is of another origin: any program may have opened it.
    """
    origin = headers.get("origin")
    if origin is None:
        is_other = headers.get("sec-fetch-site") not in (None, "none", "same-origin")
    else:
        is_other = origin not in origins and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    if not is_other:
        return None
    return ForbiddenOrigin(
        "only this server's own page may change its cache, and no page of another port; allow one with "
        "--allowed-origins"
    )


def _is_local(url: str) -> bool:
    """Returns whether a URL's host is this machine."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
