"""Client of the server that is measured, which records the arrival times of streamed answers."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from radixkv.client.errors import BadReply, StatusError
from radixkv.client.events import EventReader
from radixkv.client.http import LARGE_BODY_BYTES, HTTPClient
from radixkv.errors import ConfigError
from radixkv.lab.bench.load.record import Record

FETCH_LIMIT_S = 30.0
"""Limit of the total time of a request that is no completion."""
PROBE_LIMIT_S = 1.0
"""A server that takes no connection for this long counts as gone."""

FLUSH_ENDPOINTS = (("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache"))
"""Endpoints that empty the prefix cache, in the order in which they are tried.

The first one is for radixkv and SGLang, the second for earlier versions of SGLang, the third for vLLM.
"""


class OpenAIClient(HTTPClient):
    """``HTTPClient`` of an OpenAI-compatible server, with times of what its streams bring."""

    _last_received = -math.inf
    """When a stream brought a byte last, as a value of ``time.perf_counter``."""

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
            async for piece in self.stream(path, body):
                self._last_received = now = clock()
                pieces.append((now, piece))
        except BadReply as error:
            failure = error
            if isinstance(error, StatusError):
                self._last_received = clock()
        # Failed requests are parsed too: the stream may have the reason before it breaks off.
        if sum(len(piece) for _, piece in pieces) > LARGE_BODY_BYTES:
            await asyncio.to_thread(_parse, pieces, record)
        else:
            _parse(pieces, record)
        if failure is not None and not record.has_ended:
            raise failure
        record.check_complete(n_choices)

    async def _fetch(self, method: str, path: str) -> bytes:
        return await self.request(method, path, limit_s=min(FETCH_LIMIT_S, self.silence_limit_s))


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
