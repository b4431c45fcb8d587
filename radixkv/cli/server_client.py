"""A running server, as the commands ask it."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from radixkv.bench.load.address import server_address
from radixkv.bench.load.events import EventReader
from radixkv.errors import ConfigError, RadixKVError

ReplyT = TypeVar("ReplyT")

SILENCE_LIMIT_S = 600.0


class ServerRefused(RadixKVError):
    """The server answered with an error."""


class Server:
    """One server's JSON over HTTP. Use it as ``with``.

    Args:
        base_url: its address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.

    Every call raises ``ConfigError`` if nothing answers there, and ``ServerRefused`` with the server's reason, or
    because what it answers is not of the kind that is expected.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._address = server_address(base_url)
        self._client = httpx.Client(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(SILENCE_LIMIT_S, connect=30.0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, kind: type[ReplyT]) -> ReplyT:
        """The object at a path."""
        return self._object("GET", path, None, kind)

    def post(self, path: str, body: dict[str, Any], kind: type[ReplyT]) -> ReplyT:
        """The object that the server answers with."""
        return self._object("POST", path, body, kind)

    def stream(self, path: str, body: dict[str, Any], kind: type[ReplyT]) -> Generator[ReplyT, None, None]:
        """The objects of its events, without the final ``[DONE]``; closing it leaves the server."""
        reader = EventReader()
        try:
            with self._client.stream("POST", self._address + path, json=body) as reply:
                self._check(path, reply)
                for piece in reply.iter_bytes():
                    for data in reader.push(piece):
                        if data == b"[DONE]":
                            return
                        yield self._decoded(path, data, kind)
        except httpx.HTTPError as error:
            raise self._silence(path, error) from None
        raise ServerRefused(f"{self._address}{path}: the stream ended early")

    def _object(self, method: str, path: str, body: dict[str, Any] | None, kind: type[ReplyT]) -> ReplyT:
        try:
            reply = self._client.request(method, self._address + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._silence(path, error) from None
        self._check(path, reply)
        return self._decoded(path, reply.content, kind)

    def _check(self, path: str, reply: httpx.Response) -> None:
        if reply.is_success:
            return
        text = reply.read().decode("utf-8", "replace")
        try:
            text = msgspec.json.decode(text)["error"]["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            text = text[:300]
        remedy = "; give the server's key with --api-key" if reply.status_code == 401 else ""
        raise ServerRefused(f"{self._address}{path} answered {reply.status_code}: {text}{remedy}")

    def _decoded(self, path: str, data: bytes, kind: type[ReplyT]) -> ReplyT:
        try:
            found = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerRefused(f"{self._address}{path} did not answer with a JSON object: {error}") from None
        if found.get("error") is not None:
            raise ServerRefused(f"{self._address}{path} failed: {found['error']}")
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            raise ServerRefused(
                f"{self._address}{path} does not answer as this command expects: {error}; check --base-url"
            ) from None

    def _silence(self, path: str, error: Exception) -> ConfigError:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return ConfigError(f"{self._address}{path} does not answer: {reason}; is the server running?")
