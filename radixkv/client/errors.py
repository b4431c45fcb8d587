"""Errors of a request to a server."""

from __future__ import annotations

from radixkv.errors import RadixKVError

_GIVE_A_KEY = "; give the server's key with --api-key, --api-key-file or RADIXKV_API_KEY"


class BadReply(RadixKVError):
    """A server's reply is missing, is an error, is malformed, or ends early.

    Args:
        kind: the class of the error: ``connect``, ``disconnect``, ``timeout``, ``http_`` and the status, ``server``
            (reported inside the reply), or ``stream`` (malformed or incomplete).
        message: the error's text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StatusError(BadReply):
    """A server's reply has an HTTP status that is an error.

    Args:
        status: the HTTP status.
        body: the reply's body.
    """

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.text = body.decode("utf-8", "replace")
        self.remedy = _GIVE_A_KEY if status == 401 else ""
        super().__init__(f"http_{status}", f"HTTP status {status}: {self.text[:300]}{self.remedy}")
