"""Every error that radixkv raises on purpose.

    RadixKVError
    ├── ConfigError             a flag, setting, port or folder that cannot work
    ├── CheckpointError         a checkpoint that is missing, corrupt or of an unknown kind
    ├── RequestError            one request ended without its answer; ``code`` says why
    │   ├── InvalidRequest          a field has a wrong type or value
    │   │   ├── ContextLengthExceeded   prompt and answer do not fit the context or the pool
    │   │   └── UnsupportedFeature      a feature that this release does not have
    │   ├── QueueFull               too many requests wait
    │   ├── QueueTimeout            the request waited too long for its first step
    │   ├── Draining                the server is shutting down
    │   ├── NumericalFailure        the model gave non-finite numbers twice
    │   ├── DeviceFailure           the device failed twice on this request's step
    │   └── RuntimeDied             the runtime process is gone
    ├── DeviceError             a step failed on the device
    ├── DeviceLost              the device answers nothing any more
    ├── WireError               a frame or handshake that the other process cannot mean
    └── InvariantError          a ``check()`` found broken state: a bug in radixkv

A message says what is wrong, which value, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


def shortened(value: object) -> str:
    """A value as messages show it: its ``repr``, its middle left out beyond 40 characters."""
    is_huge = isinstance(value, int) and value.bit_length() > 256  # decimal takes long, and has a limit
    try:
        text = hex(value) if isinstance(value, int) and is_huge else repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return f"a {type(value).__name__} with a huge integer"
    return text if len(text) <= 40 else f"{text[:24]}...{text[-12:]}"


class RadixKVError(Exception):
    """The base of all of them."""


class ConfigError(RadixKVError):
    """A flag, setting, port or folder that cannot work."""


class CheckpointError(RadixKVError):
    """A checkpoint that is missing, corrupt or of an unknown kind."""


class RequestError(RadixKVError):
    """One request ended without its answer. ``code`` is what crosses the wire."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The request's field that is at fault, if one is."""


class InvalidRequest(RequestError):
    """A field of the request has a wrong type or value."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit the context or the pool."""

    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    """The request asks for a feature that this release does not have."""

    code = "unsupported_feature"


class QueueFull(RequestError):
    """As many requests wait as the server is willing to hold."""

    code = "queue_full"


class QueueTimeout(RequestError):
    """The request waited longer for its first step than the server lets it."""

    code = "queue_timeout"


class Draining(RequestError):
    """The server is shutting down and takes nothing new."""

    code = "draining"


class NumericalFailure(RequestError):
    """The model gave non-finite numbers for this request, also when computed without the cache."""

    code = "numerical_error"


class DeviceFailure(RequestError):
    """The device failed on this request's step, and again when it was retried."""

    code = "device_error"


class RuntimeDied(RequestError):
    """The runtime process ended while the request was in flight."""

    code = "runtime_died"


class DeviceError(RadixKVError):
    """A step failed on the device; what it was to write is not there."""


class DeviceLost(RadixKVError):
    """The device answers nothing any more; the process must end."""


class WireError(RadixKVError):
    """A frame or handshake that the other process cannot mean."""


class InvariantError(RadixKVError):
    """A ``check()`` found broken state: a bug in radixkv."""


_BY_CODE: dict[str, type[RequestError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        UnsupportedFeature,
        QueueFull,
        QueueTimeout,
        Draining,
        NumericalFailure,
        DeviceFailure,
        RuntimeDied,
    )
}


def request_error(code: str, message: str, *, param: str | None = None) -> RequestError:
    """The error that a ``Failed`` message stands for; an unknown code gives a plain ``RequestError``."""
    return _BY_CODE.get(code, RequestError)(message, param=param)
