"""What the OpenAPI document says about responses: their statuses, media types and errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

import msgspec

from radixkv.frontend.http.auth import OPEN_PATHS
from radixkv.frontend.http.errors import is_anthropic

OF_ALL = (400, 401, 403, 500, 503)
"""Statuses of errors that a request for any path may have."""
OF_OPEN_PATHS = (403, 500)
"""The same for ``OPEN_PATHS``."""
OF_NAMES = (404,)
"""Statuses of errors where the path or the body names something."""
OF_BODIES = (408, 413)
"""Statuses of errors in reading a body."""
EMPTY_OR_REASON: dict[int | str, dict[str, Any]] = {
    200: {"description": "Requests are accepted; without a body."},
    503: {
        "description": "Requests are refused, for this reason.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"status": {"type": "string"}},
                    "required": ["status"],
                }
            }
        },
    },
}
"""Responses of health checks."""
EMPTY_OR_REPLICAS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A token came of each replica; without a body."},
    503: {
        "description": "No token came; without a body, or with the codes of the errors, by replica.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"replicas": {"type": "object", "additionalProperties": {"type": "string"}}},
                    "required": ["replicas"],
                }
            }
        },
    },
}
"""Responses of ``/health_generate``."""
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Response that is a stream of events."""


class ErrorDetails(msgspec.Struct):
    """What is wrong, and what to do."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """An error as OpenAI's clients read it."""

    error: ErrorDetails


class AnthropicErrorReply(msgspec.Struct):
    """An error as Anthropic's clients read it, of paths that begin with /v1/messages."""

    type: Literal["error"]
    error: ErrorDetails


ERRORS = (ErrorReply, AnthropicErrorReply)


def add_responses(path: str, method: str, operation: dict[str, Any], *, names_something: bool, prefix: str) -> None:
    """Adds the responses of an operation that its route does not tell.

    Args:
        path: of the operation.
        method: of HTTP, in small letters.
        operation: the object of the document that gets them.
        names_something: whether the path or the body has a name that may not exist.
        prefix: of references to schemas.
    """
    reply = AnthropicErrorReply if is_anthropic(path) else ErrorReply
    content = {"application/json": {"schema": {"$ref": f"{prefix}{reply.__name__}"}}}
    statuses = [
        *(OF_OPEN_PATHS if path in OPEN_PATHS else OF_ALL),
        *(OF_NAMES if names_something else ()),
        *(OF_BODIES if "requestBody" in operation else ()),
    ]
    responses = operation["responses"]
    for status in map(HTTPStatus, statuses):
        responses.setdefault(str(status.value), {"description": status.phrase, "content": content})
    if method == "head":
        for response in responses.values():
            response.pop("content", None)
    operation["responses"] = dict(sorted(responses.items()))
