"""The log of requests: one line of JSON for each that has ended, without any text of it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.frontend.in_flight import EndedRequest
from radixkv.frontend.metrics.log import log_line

STANDARD_ERROR = "-"
"""The name of standard error instead of a file."""
_HASH_BYTES = 8


class RequestLine(msgspec.Struct):
    """The fields of a line. Times are in seconds, rounded to microseconds."""

    time: str
    """The end of the request, in ISO 8601."""
    id: str
    """The id of the response after its prefix, such as ``chatcmpl-``."""
    request_id: str
    """The ``X-Request-Id`` of request and response."""
    route: str
    model: str
    prompt_tokens: int
    cached_tokens: dict[str, int] | None
    """By tier: ``device``, ``host`` and ``storage``. None, like ``queue_s``, if the request failed, or the client
    left before the end."""
    completion_tokens: int
    """Tokens generated, of all choices."""
    queue_s: float | None
    """From the runtime's receipt to the first scheduled row."""
    load_s: float | None
    """The part of ``queue_s`` in which the request waited for pages from lower tiers; None if it did not."""
    ttft_s: float | None
    """From the HTTP request's arrival to its first token; None if there was none."""
    e2e_s: float
    """From the HTTP request's arrival to the end."""
    finish_reason: str | None
    """Several choices have their distinct reasons, separated by commas. None if the request did not complete."""
    error: str | None
    """The code of the error that ended the request."""
    client_disconnected: bool
    priority: int
    tenant: str | None
    """Whose key it had; None for the operator's, and without tenants."""
    cache_salt_hash: str | None
    """Equal for requests of one salt, until the server ends; None without a salt."""


class RequestLog:
    """Writes a line for each request that ends.

    Args:
        model: the served model's name.
        adapters: names of its adapters by their digests.
        write: takes the lines. An ``OSError`` of it is logged once, and the line is lost.
    """

    def __init__(
        self,
        model: str,
        write: Callable[[bytes], object],
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._write = write
        self._has_failed = False
        self._salt_key = secrets.token_bytes(16)  # without a key, salts that can be guessed could be found out

    def add(self, ended: EndedRequest) -> None:
        """Writes the line of a request."""
        line = msgspec.json.encode(self._line(ended)) + b"\n"
        try:
            self._write(line)
        except OSError as error:
            if not self._has_failed:
                log_line(f"the log of requests cannot be written: {error.strerror}; lines are lost")
            self._has_failed = True
        else:
            self._has_failed = False

    def _line(self, ended: EndedRequest) -> RequestLine:
        prompt, done, arrived_at = ended.prompt, ended.done, ended.arrival.at
        loading = None if done is None else done.load_interval_s
        is_complete = ended.error_code is None and not ended.client_left
        return RequestLine(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            id=prompt.id,
            request_id=ended.arrival.request_id,
            route=ended.arrival.route,
            model=self._adapters.get(prompt.namespace.adapter, self._model),
            prompt_tokens=len(prompt.tokens) // 4,
            cached_tokens=ended.cached_tokens,
            completion_tokens=ended.n_output,
            queue_s=None if done is None else round(done.queue_time_s, 6),
            load_s=None if loading is None else round(loading[1] - loading[0], 6),
            ttft_s=None if ended.first_token_at is None else round(ended.first_token_at - arrived_at, 6),
            e2e_s=round(ended.ended_at - arrived_at, 6),
            finish_reason=",".join(dict.fromkeys(ended.finish_reasons)) if is_complete else None,
            error=ended.error_code,
            client_disconnected=ended.client_left,
            priority=prompt.priority,
            tenant=prompt.namespace.tenant or None,
            cache_salt_hash=self._hash(salt) if (salt := prompt.namespace.cache_salt) else None,
        )

    def _hash(self, salt: str) -> str:
        return hashlib.blake2b(salt.encode(), key=self._salt_key, digest_size=_HASH_BYTES).hexdigest()


@contextlib.contextmanager
def open_request_log(path: str) -> Iterator[Callable[[bytes], object]]:
    """Opens a file to which lines are appended, or standard error for ``-``; yields what writes to it.

    Raises:
        ConfigError: the file cannot be opened.
    """
    try:
        if path == STANDARD_ERROR:
            descriptor = os.dup(sys.stderr.fileno())
        else:
            # A pipe that nobody reads must block neither the start nor, once it is full, the requests.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        reason = "nobody reads this pipe or socket" if error.errno == errno.ENXIO else error.strerror
        raise _unwritable(path, reason) from None
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unwritable(path, "it is a disk, whose contents would be destroyed")
    try:
        yield _LineWriter(descriptor).write
    finally:
        os.close(descriptor)


def _unwritable(path: str, reason: object) -> ConfigError:
    return ConfigError(f"request_log {shortened(path)} cannot be written: {reason}; choose another --request-log")


class _LineWriter:
    """Appends lines. Each is one write, so that several writers and log rotation by copies do no harm."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_within_a_line = False
        """Whether a part of a line is at the end, which the next line must not continue."""

    def write(self, line: bytes) -> None:
        """Writes a line. Raises ``OSError`` if it is not written, or only a part of it, as on a full disk."""
        content = b"\n" + line if self._is_within_a_line else line
        n_written = os.write(self._descriptor, content)
        if n_written:
            self._is_within_a_line = not content[:n_written].endswith(b"\n")
        if n_written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
