"""Every error that radixkv raises on purpose.

    RadixKVError
    ├── ConfigError             a flag, setting, port or folder that cannot work
    ├── CheckpointError         a checkpoint that is missing, corrupt or of an unknown kind
    ├── RequestError            one request failed; ``code`` says why
    │   ├── InvalidRequest          a field has a wrong type or value
    │   │   ├── ContextLengthExceeded   prompt and output do not fit the context or the pool
    │   │   ├── UnsupportedFeature      a feature that this release does not have
    │   │   └── ModelNotFound           no model or adapter of the requested name is served
    │   ├── SessionNotFound         no request had this session id, or its session was closed
    │   ├── QueueFull               too many requests are waiting
    │   ├── QueueTimeout            the request waited too long for its first step
    │   ├── Draining                the server is shutting down
    │   ├── NumericalFailure        the model gave non-finite values twice
    │   ├── GrammarFailure          the grammar rejected a sampled token
    │   ├── DeviceFailure           the device failed on this request, and again on its retry
    │   └── RuntimeDied             the runtime process is gone
    ├── DeviceError             a step failed on the device
    ├── DeviceLost              the device does not respond any more
    ├── WireError               an invalid frame or handshake
    └── InvariantError          a ``check()`` found inconsistent state: a bug in radixkv

A message says what is wrong, which value, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import ClassVar

_MAX_ENUMERATED = 16


def shortened(value: object) -> str:
    """Returns the ``repr`` of a value for error texts, without its middle if longer than 40 characters."""
    is_huge = isinstance(value, int) and value.bit_length() > 256  # converting it to decimal is slow, and limited
    try:
        text = hex(value) if isinstance(value, int) and is_huge else repr(value)
    except ValueError:  # Python converts no integer of more than 4,300 digits to decimal
        return f"a {type(value).__name__} with a huge integer"
    return text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}"


def enumerated(values: Collection[object]) -> str:
    """Returns ``shortened`` of the first values, and how many others there are; empty without values."""
    shown = ", ".join(map(shortened, islice(values, _MAX_ENUMERATED)))
    n_more = len(values) - _MAX_ENUMERATED
    return f"{shown} and {n_more} more" if n_more > 0 else shown


class RadixKVError(Exception):
    """Base class of all errors that radixkv raises on purpose."""


class ConfigError(RadixKVError):
    """A flag, setting, port or folder that cannot work."""


class CheckpointError(RadixKVError):
    """A checkpoint that is missing, corrupt or of an unknown kind."""


class RequestError(RadixKVError):
    """One request failed. ``code`` identifies the class in a ``Failed`` message."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is at fault, if any."""
        self.index: int | None = None
        """The number of the prompt that failed, of the several that the field has; the text begins with it."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.index is None else f"{self.param or 'prompt'}[{self.index}]: {text}"


class InvalidRequest(RequestError):
    """A field of the request has a wrong type or value."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the context or the pool.

    Args:
        message: the text of the error.
        param: the field to reduce.
        limit: most tokens of prompt and output together; None if no model could take the prompt.
        n_prompt: tokens of the prompt, if it alone is too long and has been counted.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, limit: int | None = None, n_prompt: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.n_prompt = n_prompt
        self.reason: str | None = None
        """Why ``limit`` is lower than the model's own, if it is; the text ends with it."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.reason is None else f"{text} ({self.reason})"


class UnsupportedFeature(InvalidRequest):
    """The request asks for a feature that this release does not have."""

    code = "unsupported_feature"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served."""

    code = "model_not_found"


class SessionNotFound(RequestError):
    """No request had this session id, or its session was closed or forgotten."""

    code = "session_not_found"


class QueueFull(RequestError):
    """The waiting queue has ``max_queued_requests`` requests."""

    code = "queue_full"


class QueueTimeout(RequestError):
    """The request waited longer than ``queue_timeout_s`` for its first step."""

    code = "queue_timeout"


class Draining(RequestError):
    """The server is shutting down and accepts no new requests."""

    code = "draining"


class NumericalFailure(RequestError):
    """The model gave non-finite values for this request, also when computed without the cache."""

    code = "numerical_error"


class GrammarFailure(RequestError):
    """The grammar of this request rejected a sampled token."""

    code = "grammar_error"


class DeviceFailure(RequestError):
    """The device failed on this request's step, and again when it was retried alone."""

    code = "device_error"


class RuntimeDied(RequestError):
    """The runtime process ended while the request was in flight."""

    code = "runtime_died"


class DeviceError(RadixKVError):
    """A step failed on the device; its KV writes may be missing."""


class DeviceLost(RadixKVError):
    """The device does not respond any more; the process must end."""


class WireError(RadixKVError):
    """An invalid frame or handshake."""


class InvariantError(RadixKVError):
    """A ``check()`` found inconsistent state: a bug in radixkv."""


_BY_CODE: dict[str, type[RequestError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        UnsupportedFeature,
        ModelNotFound,
        SessionNotFound,
        QueueFull,
        QueueTimeout,
        Draining,
        NumericalFailure,
        GrammarFailure,
        DeviceFailure,
        RuntimeDied,
    )
}


def context_length_exceeded(
    found: str, limit: int | None, *, advice: str = "shorten it", param: str, n_prompt: int | None = None
) -> ContextLengthExceeded:
    """Returns the error for what does not fit, in OpenAI's words, by which clients know it.

    Args:
        found: what does not fit, as a clause.
        limit: the maximum of tokens in prompt and output together; None if no model could take it.
        advice: what to do.
        param: the field at fault.
        n_prompt: tokens of the prompt, if it alone is too long and has been counted.
    """
    if limit is None:
        text = f"whatever this model's maximum context length is, the conversation is too large: {found}; {advice}"
    else:
        text = f"This model's maximum context length is {limit} tokens. However, {found}; {advice}"
    return ContextLengthExceeded(text, param=param, limit=limit, n_prompt=n_prompt)


def queue_timeout(waited_s: float, limit_s: float) -> QueueTimeout:
    """Returns the error for a request that waited longer for its first step than the server allows, in seconds."""
    return QueueTimeout(
        f"the request waited {waited_s:.1f} s for its first step, longer than this server's limit of "
        f"{limit_s:g} s; try later"
    )


def request_error(code: str, message: str, *, param: str | None = None) -> RequestError:
    """Returns the error that a ``Failed`` message describes; an unknown code gives a plain ``RequestError``."""
    return _BY_CODE.get(code, RequestError)(message, param=param)
