"""Requests of the commands that talk to a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from radixkv.client.chunks import Chunk, read_chunk
from radixkv.client.errors import BadReply, StatusError
from radixkv.client.events import EventReader
from radixkv.client.http import HTTPClient
from radixkv.errors import ConfigError, RadixKVError

ReplyT = TypeVar("ReplyT")
T = TypeVar("T")


class ServerError(RadixKVError):
    """The server answered with an error, or not as expected."""


class ServerClient:
    """A client of one server's JSON API and a context manager; its calls block.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.

    Every method raises ``ConfigError`` if nothing answers at the address, and ``ServerError`` if the server answers
    with an error or with JSON of another type. Ctrl-C cancels the request and raises ``KeyboardInterrupt``.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._http = HTTPClient(base_url, api_key=api_key, use_environment=True)
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        self._loop.run(self._http.__aenter__())
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.run(self._http.__aexit__(error_type, error, traceback))
        self._loop.close()

    def get(self, path: str, response_type: type[ReplyT], *, limit_s: float | None = None) -> ReplyT:
        """Returns the response of a GET request, which may take ``limit_s``."""
        return self._decode(path, self._run(path, self._http.request("GET", path, limit_s=limit_s)), response_type)

    def post(self, path: str, body: dict[str, Any], response_type: type[ReplyT]) -> ReplyT:
        """Returns the response of a POST request."""
        reply = self._run(path, self._http.request("POST", path, msgspec.json.encode(body)))
        return self._decode(path, reply, response_type)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """Yields the events of a streamed completion, without the final ``[DONE]``. Closing it disconnects.

        A stream without ``[DONE]``, which some servers leave out, is whole if every choice has a finish reason.
        """
        reader = EventReader()
        pieces = self._http.stream(path, msgspec.json.encode(body))
        unfinished: dict[int, bool] = {}
        """Whether a choice has no finish reason yet, by its index."""

        def is_whole() -> bool:
            return bool(unfinished) and not any(unfinished.values())

        async def next_piece() -> bytes:
            try:
                return await anext(pieces, b"")
            except BadReply as error:
                if error.kind == "disconnect" and is_whole():
                    return b""
                raise

        try:
            is_open = True
            while is_open:
                piece = self._run(path, next_piece())
                is_open = bool(piece)
                for data in reader.push(piece) if is_open else reader.finish():
                    if data == b"[DONE]":
                        return
                    try:
                        chunk = read_chunk(data)
                    except BadReply as error:
                        raise ServerError(f"{self._http.address}{path}: {error}") from None
                    for choice in chunk.choices:
                        unfinished[choice.index] = choice.finish_reason is None and unfinished.get(
                            choice.index, True
                        )
                    yield chunk
        finally:
            self._loop.run(pieces.aclose())
        if not is_whole():
            raise ServerError(f"{self._http.address}{path}: the stream ended early")

    def _run(self, path: str, request: Coroutine[Any, Any, T]) -> T:
        address = f"{self._http.address}{path}"
        try:
            return self._loop.run(request)
        except StatusError as error:
            text = _error_message(error.text)
            raise ServerError(f"{address} answered {error.status}: {text}{error.remedy}") from None
        except BadReply as error:
            raise ConfigError(f"{address} does not answer: {error}; is the server running?") from None

    def _decode(self, path: str, data: bytes, response_type: type[ReplyT]) -> ReplyT:
        address = f"{self._http.address}{path}"
        try:
            content = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"{address} did not answer with a JSON object: {error}") from None
        if content.get("error") is not None:
            raise ServerError(f"{address} failed: {content['error']}")
        try:
            return msgspec.convert(content, response_type)
        except msgspec.ValidationError as error:
            raise ServerError(
                f"{address} does not answer as this command expects: {error}; check --base-url"
            ) from None


def _error_message(text: str) -> str:
    """Returns OpenAI's ``error.message`` of a response, or the beginning of another response."""
    try:
        message: str = msgspec.json.decode(text)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return text[:300]
    return message
