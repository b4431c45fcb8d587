"""HTTP client that records the arrival times of streamed answers."""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from radixkv.bench.load.address import server_address
from radixkv.bench.load.chunks import BadReply
from radixkv.bench.load.events import EventReader
from radixkv.bench.load.record import Record
from radixkv.errors import ConfigError

SILENCE_LIMIT_S = 600.0
"""Default limit of the time without a byte from the server, in completions."""
CONNECT_LIMIT_S = 30.0
"""Limit of the time to connect."""
FETCH_LIMIT_S = 30.0
"""Limit of the total time of a request that is no completion."""
KEEP_ALIVE_S = 3.0
"""Idle time after which connections are closed.

It is shorter than the servers' own (uvicorn: 5 s): a request on a connection that the server closes would fail.
"""
LARGE_BODY_BYTES = 1 << 18
"""Longer requests are sent in pieces and longer replies are parsed in a thread, to keep the event loop free."""
PROBE_LIMIT_S = 1.0
"""A server that takes no connection for this long counts as gone."""

FLUSH_ENDPOINTS = (("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache"))
"""Endpoints that empty the prefix cache, in the order in which they are tried.

They are those of radixkv and SGLang, of earlier SGLang, and of vLLM.
"""


class OpenAIClient:
    """Client of one OpenAI-compatible server; used as ``async with``.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.
        use_environment: whether proxies and certificates of the environment apply.
        silence_limit_s: a request fails if the server sends nothing for longer.

    Raises:
        ConfigError: ``base_url`` is no HTTP URL.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        use_environment: bool = False,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self.address = server_address(base_url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._use_environment = use_environment
        self._silence_limit_s = silence_limit_s
        self._last_received = -math.inf

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            # Compression would change the pieces in which a stream arrives.
            headers={**self._headers, "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=min(CONNECT_LIMIT_S, self._silence_limit_s),
                sock_read=self._silence_limit_s,
            ),
            trust_env=self._use_environment,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model(self) -> str:
        """Returns the name of the first model that the server lists.

        Raises:
            ConfigError: no OpenAI-compatible server answers at the address.
        """
        url = f"{self.address}/v1/models"
        try:
            return msgspec.json.decode(await self._fetch("GET", "/v1/models"), type=_Models).data[0].id
        except BadReply as error:
            if error.kind.startswith("http_"):
                remedy = "" if error.kind in ("http_401", "http_403") else "; give an OpenAI-compatible server"
                raise ConfigError(f"{url} answers {error}{remedy}") from None
            raise ConfigError(f"{url} does not answer: {error}; is the server running?") from None
        except (msgspec.MsgspecError, IndexError):
            raise ConfigError(f"{url} does not list a model; give an OpenAI-compatible server") from None

    async def flush(self) -> str | None:
        """Empties the server's prefix cache and returns the endpoint's path; None: the server has no endpoint."""
        for method, path in FLUSH_ENDPOINTS:
            try:
                await self._fetch(method, path)
            except BadReply:
                continue
            return path
        return None

    async def metrics(self) -> str | None:
        """Returns the text of ``/metrics``; None: the server has no metrics."""
        try:
            return (await self._fetch("GET", "/metrics")).decode("utf-8", "replace")
        except BadReply:
            return None

    async def is_reachable(self) -> bool:
        """Returns whether the server accepts a connection within ``PROBE_LIMIT_S``.

        A server that accepts a connection and then sends nothing, or something that is no HTTP, is reachable.
        """
        deadline = time.monotonic() + PROBE_LIMIT_S
        while time.monotonic() < deadline:
            try:
                await self._fetch("GET", "/v1/models")
            except BadReply as error:
                if error.kind not in ("connect", "disconnect"):
                    return True
                await asyncio.sleep(0.1)
            else:
                return True
        return False

    async def is_unhealthy(self) -> bool:
        """Returns whether ``/health`` has status 503, which radixkv, vLLM and SGLang use when they cannot serve."""
        try:
            await self._fetch("GET", "/health")
        except BadReply as error:
            return error.kind == "http_503"
        return False

    def is_silent_since(self, moment: float) -> bool:
        """Returns whether no reply to any request has brought a byte of its body since ``moment``.

        Response headers do not count: servers send them before they know whether there will be an answer.

        Args:
            moment: a value of ``time.perf_counter``.
        """
        return self._last_received < moment

    async def send(self, path: str, body: bytes, record: Record, *, n_choices: int = 1) -> None:
        """Sends a completion request and records when it was sent and what streamed back at what time.

        While pieces arrive, only their times are taken; they are parsed after the last one, so that parsing does
        not delay the time stamps of other requests.

        Args:
            path: the endpoint.
            body: the request's JSON.
            record: receives the times and the answer.
            n_choices: number of choices that ``body`` requests.

        Raises:
            BadReply: the request failed; ``record`` has what arrived until then.
        """
        pieces: list[tuple[float, bytes]] = []
        failure: BadReply | None = None
        clock = time.perf_counter
        record.started = clock()
        try:
            with _transport_errors():
                # aiohttp sends a file object in pieces, between which other requests get their time stamps.
                data = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
                async with self._http.post(
                    self.address + path, data=data, headers={"Content-Type": "application/json"}
                ) as reply:
                    if not reply.ok:
                        self._last_received = clock()
                        raise _status_error(reply.status, await reply.read())
                    content = reply.content
                    while piece := await content.readany():  # to the end, so that the connection can be reused
                        self._last_received = now = clock()
                        pieces.append((now, piece))
        except BadReply as error:
            failure = error
        # Failed requests are parsed too: the stream may have the reason before it breaks off.
        if sum(len(piece) for _, piece in pieces) > LARGE_BODY_BYTES:
            await asyncio.to_thread(_parse, pieces, record)
        else:
            _parse(pieces, record)
        if failure is not None and not record.is_done:
            raise failure
        record.check_complete(n_choices)

    async def _fetch(self, method: str, path: str) -> bytes:
        with _transport_errors():
            limit = aiohttp.ClientTimeout(total=min(FETCH_LIMIT_S, self._silence_limit_s))
            async with self._http.request(method, self.address + path, timeout=limit) as reply:
                text = await reply.read()
        if not reply.ok:
            raise _status_error(reply.status, text)
        return text


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _parse(pieces: list[tuple[float, bytes]], record: Record) -> None:
    """Adds the events of a stream's pieces, each with its time, to the record. Raises ``BadReply``."""
    reader = EventReader()
    arrival = 0.0
    for received, piece in pieces:
        arrival = received - record.started
        for data in reader.push(piece):
            record.add_event(data, arrival)
    for data in reader.finish():
        record.add_event(data, arrival)


def _status_error(status: int, text: bytes) -> BadReply:
    remedy = "; give the server's key with --api-key" if status == 401 else ""
    return BadReply(f"http_{status}", f"HTTP status {status}: {text.decode('utf-8', 'replace')[:300]}{remedy}")


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Turns aiohttp's errors into ``BadReply``."""
    try:
        yield
    except TimeoutError as error:  # the base class of aiohttp's several timeout errors
        raise BadReply("timeout", _reason(error)) from None
    except aiohttp.ClientConnectorError as error:
        raise BadReply("connect", _reason(error)) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise BadReply("disconnect", _reason(error)) from None
    except aiohttp.ClientResponseError as error:  # the reply is not valid HTTP
        raise BadReply("stream", _reason(error)) from None
    except (aiohttp.ClientError, ValueError) as error:
        raise BadReply("connect", _reason(error)) from None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
