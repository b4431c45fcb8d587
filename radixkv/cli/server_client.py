"""HTTP client of the commands that talk to a running server."""

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

READ_TIMEOUT_S = 600.0


class ServerError(RadixKVError):
    """The server answered with an error, or not as expected."""


class ServerClient:
    """A client of one server's JSON API and a context manager.

    Every method raises ``ConfigError`` if nothing answers at the address, and ``ServerError`` if the server answers
    with an error or with JSON of another type.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._address = server_address(base_url)
        self._client = httpx.Client(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=30.0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, response_type: type[ReplyT]) -> ReplyT:
        """Returns the response of a GET request."""
        return self._request("GET", path, None, response_type)

    def post(self, path: str, body: dict[str, Any], response_type: type[ReplyT]) -> ReplyT:
        """Returns the response of a POST request."""
        return self._request("POST", path, body, response_type)

    def stream(self, path: str, body: dict[str, Any], response_type: type[ReplyT]) -> Generator[ReplyT, None, None]:
        """Yields the events of a streamed response, without the final ``[DONE]``. Closing it disconnects."""
        reader = EventReader()
        try:
            with self._client.stream("POST", self._address + path, json=body) as reply:
                self._check_status(path, reply)
                for piece in reply.iter_bytes():
                    for data in reader.push(piece):
                        if data == b"[DONE]":
                            return
                        yield self._decode(path, data, response_type)
        except httpx.HTTPError as error:
            raise self._connection_error(path, error) from None
        raise ServerError(f"{self._address}{path}: the stream ended early")

    def _request(self, method: str, path: str, body: dict[str, Any] | None, response_type: type[ReplyT]) -> ReplyT:
        try:
            reply = self._client.request(method, self._address + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._connection_error(path, error) from None
        self._check_status(path, reply)
        return self._decode(path, reply.content, response_type)

    def _check_status(self, path: str, reply: httpx.Response) -> None:
        if reply.is_success:
            return
        text = reply.read().decode("utf-8", "replace")
        try:
            text = msgspec.json.decode(text)["error"]["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            text = text[:300]
        remedy = "; give the server's key with --api-key" if reply.status_code == 401 else ""
        raise ServerError(f"{self._address}{path} answered {reply.status_code}: {text}{remedy}")

    def _decode(self, path: str, data: bytes, response_type: type[ReplyT]) -> ReplyT:
        try:
            content = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"{self._address}{path} did not answer with a JSON object: {error}") from None
        if content.get("error") is not None:
            raise ServerError(f"{self._address}{path} failed: {content['error']}")
        try:
            return msgspec.convert(content, response_type)
        except msgspec.ValidationError as error:
            raise ServerError(
                f"{self._address}{path} does not answer as this command expects: {error}; check --base-url"
            ) from None

    def _connection_error(self, path: str, error: Exception) -> ConfigError:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return ConfigError(f"{self._address}{path} does not answer: {reason}; is the server running?")
