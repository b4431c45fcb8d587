"""HTTP statuses of errors, and their JSON as OpenAI's and Anthropic's clients read it."""

from __future__ import annotations

from typing import Any, ClassVar

from radixkv.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestError,
    SessionNotFound,
    UnsupportedFeature,
    shortened,
)


class ThreadNotStored(UnsupportedFeature):
    """The request asks the server to keep its conversation, as a thread of Anthropic's API."""

    code: ClassVar[str] = "thread_unsupported_request"


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than the server reads."""

    code: ClassVar[str] = "body_too_large"


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""

    code: ClassVar[str] = "body_too_slow"


class Unauthorized(InvalidRequest):
    """The request lacks the server's API key."""

    code: ClassVar[str] = "invalid_api_key"


class ForbiddenOrigin(InvalidRequest):
    """The request comes from another site's web page or names another host."""

    code: ClassVar[str] = "forbidden"


class OperatorOnly(InvalidRequest):
    """The path is for the operator's key, and the request has a tenant's."""

    code: ClassVar[str] = "forbidden"


class RouteNotFound(InvalidRequest):
    """No route has this path."""

    code: ClassVar[str] = "not_found"


class RequestNotFound(InvalidRequest):
    """No running request has this id: it has ended, or there was none."""

    code: ClassVar[str] = "request_not_found"


class MethodNotAllowed(InvalidRequest):
    """The path exists for other methods only."""

    code: ClassVar[str] = "method_not_allowed"


class RuntimeSilent(RequestError):
    """The runtime did not reply to a query in time."""

    code: ClassVar[str] = "runtime_silent"


class RuntimeRestarting(RequestError):
    """The runtime process has died and is started again.

    Args:
        message: the text of the error.
        ready_at: when the process is expected to be ready, in monotonic seconds.
    """

    code: ClassVar[str] = "runtime_restarting"

    def __init__(self, message: str, *, ready_at: float = 0.0) -> None:
        super().__init__(message)
        self.ready_at = ready_at


class ClientTooSlow(RequestError):
    """The client read its stream too slowly."""

    code: ClassVar[str] = "client_too_slow"


_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "ContentTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""By status; ``invalid_request_error`` for all others."""

_UNAVAILABLE = frozenset(
    {"queue_full", "queue_timeout", "draining", "runtime_died", "runtime_restarting", "runtime_silent"}
)


def request_not_found(name: str) -> RequestNotFound:
    """Returns the error for the id of a request that is not in flight."""
    return RequestNotFound(
        f"no running request has the id {shortened(name)}: it has ended, or there was none; give the id of its "
        "reply or its X-Request-Id while it runs",
        param="request",
    )


def status_of(error: RequestError) -> int:
    """Returns the HTTP status of an error."""
    match error:
        case ModelNotFound() | RequestNotFound() | RouteNotFound() | SessionNotFound():
            return 404
        case MethodNotAllowed():
            return 405
        case Unauthorized():
            return 401
        case ForbiddenOrigin() | OperatorOnly():
            return 403
        case BodyTooSlow():
            return 408
        case BodyTooLarge():
            return 413
        case InvalidRequest():
            return 400
    return 503 if error.code in _UNAVAILABLE else 500


def is_anthropic(path: str) -> bool:
    """Returns whether errors of a path have Anthropic's format."""
    return path.startswith("/v1/messages")


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """Returns the JSON object of an error, in the format of the path's API."""
    status = status_of(error)
    details: dict[str, Any] = {"param": error.param, "code": error.code}
    if not is_anthropic(path):
        return {"error": {"message": str(error), "type": _TYPES[status], **details}}
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    if isinstance(error, ThreadNotStored):  # clients that find the code here send the whole conversation instead
        details["details"] = {"error_code": error.code}
    return {"type": "error", "error": {"type": kind, "message": _anthropic_message(error), **details}}


def _anthropic_message(error: RequestError) -> str:
    """Returns the text of an error; Anthropic's own, which its clients parse, if a prompt is too long."""
    if not isinstance(error, ContextLengthExceeded) or error.limit is None:
        return str(error)
    if error.n_prompt is None:
        return f"prompt is too long: {error}"
    maximum = min(error.limit, error.n_prompt - 1)  # there must be room for a token of the answer
    because = "" if error.reason is None else f" ({error.reason})"
    return f"prompt is too long: {error.n_prompt} tokens > {maximum} maximum{because}"
