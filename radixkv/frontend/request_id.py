"""The id of an HTTP request, which its client or a proxy may have given."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import Scope

MAX_REQUEST_ID_BYTES = 128
"""Longest id that is taken from a client."""
_VALID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_BYTES)
_REQUEST_ID = "request_id"


def set_request_id(scope: Scope, given: bytes) -> bytes:
    """Notes and returns the id of a request.

    Args:
        scope: of the request.
        given: the id that came with it. A new one, of 32 hexadecimal digits, takes the place of one that is empty,
            longer than ``MAX_REQUEST_ID_BYTES`` or not of visible ASCII.
    """
    request_id = given if _VALID.fullmatch(given) else uuid.uuid4().hex.encode()
    scope.setdefault("state", {})[_REQUEST_ID] = request_id.decode()
    return request_id


def request_id_of(request: Request) -> str:
    """Returns the id of a request."""
    request_id: str = request.scope["state"][_REQUEST_ID]
    return request_id
