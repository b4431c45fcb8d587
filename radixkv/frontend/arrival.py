"""What is known of an HTTP request before its body: its id, whose it is, when and where it arrived."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple, Self

from starlette.requests import Request
from starlette.types import Scope

from radixkv.settings.tenants import OPERATOR
from radixkv.wire.request_limits import check_session_id

MAX_REQUEST_ID_BYTES = 128
"""Longest id that is taken from a client."""
SESSION_HEADER = "x-session-id"
_VALID_ID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_BYTES)
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_REQUEST_ID, _TENANT = "request_id", "tenant"


def set_request_id(scope: Scope, given: bytes) -> bytes:
    """Notes and returns the id of a request.

    Args:
        scope: of the request.
        given: the id that came with it. A new one, of 32 hexadecimal digits, takes the place of one that is empty,
            longer than ``MAX_REQUEST_ID_BYTES`` or not of visible ASCII.
    """
    request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex.encode()
    scope.setdefault("state", {})[_REQUEST_ID] = request_id.decode()
    return request_id


def set_tenant(scope: Scope, name: str) -> None:
    """Notes the tenant of a request, which the check of its key has found."""
    scope.setdefault("state", {})[_TENANT] = name


def tenant_of(request: Request) -> str:
    """Returns the name of a request's tenant; ``OPERATOR`` on a server without tenants."""
    name: str = request.scope.get("state", {}).get(_TENANT, OPERATOR)
    return name


class Arrival(NamedTuple):
    """When and where an HTTP request arrived, and whose it is."""

    at: float
    """In monotonic seconds."""
    route: str = ""
    """Its path; empty for requests of the server itself, which are not reported."""
    trace_headers: Mapping[str, str] = {}
    """The headers ``traceparent`` and ``tracestate`` of W3C Trace Context, as far as it has them."""
    tenant: str = OPERATOR
    """Who sent it."""
    request_id: str = ""
    """The id that its response has."""
    session_id: str = ""
    """The session id in its header ``X-Session-Id``, for a body without one."""

    @classmethod
    def of(cls, request: Request) -> Self:
        """Returns the ``Arrival`` of this request, with the present time.

        Raises:
            InvalidRequest: the id of its session is too long.
        """
        session_id = request.headers.get(SESSION_HEADER, "")
        check_session_id(session_id)
        trace_headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.scope["headers"]
            if name in _TRACE_HEADERS
        }
        return cls(
            at=time.monotonic(),
            route=request.scope["path"],
            trace_headers=trace_headers,
            tenant=tenant_of(request),
            request_id=request.scope["state"][_REQUEST_ID],
            session_id=session_id,
        )
