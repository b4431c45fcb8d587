"""A client of one OpenAI-compatible server, which notes when each piece of an answer comes."""

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
CONNECT_LIMIT_S = 30.0
WHOLE_LIMIT_S = 30.0
"""For all that is no completion."""
KEEP_ALIVE_S = 3.0
"""Servers close connections that are idle for longer, uvicorn after 5 s; a request sent meanwhile would fail."""
WHOLE_BYTES = 1 << 18
"""A longer request is not handed over at once, and a longer reply is read in a thread."""
ABSENCE_S = 1.0
"""A server that takes no connection for so long is gone."""

FLUSHES = (("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache"))
"""How servers are told to empty their prefix cache: this one and SGLang, earlier SGLang, vLLM."""


class Client:
    """Use it as ``async with``.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.
        use_environment: whether proxies and certificates of the environment apply.
        silence_limit_s: a request whose server sends nothing for longer has failed.

    Raises:
        ConfigError: ``base_url`` is no address.
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
        self._heard = -math.inf

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            # A compressed stream would come in other pieces.
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
        """The name of the first model that the server serves.

        Raises:
            ConfigError: nothing that answers like an OpenAI-compatible server is there.
        """
        url = f"{self.address}/v1/models"
        try:
            return msgspec.json.decode(await self._whole("GET", "/v1/models"), type=_Models).data[0].id
        except BadReply as error:
            if error.kind.startswith("http_"):
                remedy = "" if error.kind in ("http_401", "http_403") else "; give an OpenAI-compatible server"
                raise ConfigError(f"{url} answers {error}{remedy}") from None
            raise ConfigError(f"{url} does not answer: {error}; is the server running?") from None
        except (msgspec.MsgspecError, IndexError):
            raise ConfigError(f"{url} does not list a model; give an OpenAI-compatible server") from None

    async def flush(self) -> str | None:
        """Empties the server's prefix cache; the path of the endpoint that did, None if there is none."""
        for method, path in FLUSHES:
            try:
                await self._whole(method, path)
            except BadReply:
                continue
            return path
        return None

    async def metrics(self) -> str | None:
        """What ``/metrics`` says; None if there is none."""
        try:
            return (await self._whole("GET", "/metrics")).decode("utf-8", "replace")
        except BadReply:
            return None

    async def is_there(self) -> bool:
        """Whether anything takes connections there; False after ``ABSENCE_S`` without.

        Who takes one and then says nothing, or no HTTP, counts as there.
        """
        deadline = time.monotonic() + ABSENCE_S
        while time.monotonic() < deadline:
            try:
                await self._whole("GET", "/v1/models")
            except BadReply as error:
                if error.kind not in ("connect", "disconnect"):
                    return True
                await asyncio.sleep(0.1)
            else:
                return True
        return False

    async def is_dying(self) -> bool:
        """Whether its ``/health`` says 503, as those of radixkv, vLLM and SGLang do once they cannot serve."""
        try:
            await self._whole("GET", "/health")
        except BadReply as error:
            return error.kind == "http_503"
        return False

    def is_silent_since(self, moment: float) -> bool:
        """Whether no reply to any request has brought anything since; ``moment`` is of ``time.perf_counter``.

        The head of a stream is nothing: servers send it before they know whether there will be an answer.
        """
        return self._heard < moment

    async def ask(self, path: str, body: bytes, record: Record, *, n_choices: int = 1) -> None:
        """Sends a request and notes in ``record`` when it was sent, and what streamed back when.

        Pieces are only stamped while they come; what they say is read when the last one is there, so that the
        next request's pieces are not stamped late.

        Args:
            n_choices: as many as ``body`` asks for.

        Raises:
            BadReply: it failed; ``record`` has what came until then.
        """
        stamped: list[tuple[float, bytes]] = []
        failure: BadReply | None = None
        clock = time.perf_counter
        record.started = clock()
        try:
            with _failures():
                # In pieces if it is long, between which other requests' answers are stamped.
                data = body if len(body) <= WHOLE_BYTES else io.BytesIO(body)
                async with self._http.post(
                    self.address + path, data=data, headers={"Content-Type": "application/json"}
                ) as reply:
                    if not reply.ok:
                        self._heard = clock()
                        raise _refusal(reply.status, await reply.read())
                    content = reply.content
                    while piece := await content.readany():  # to the end, so that the connection can be used again
                        self._heard = came = clock()
                        stamped.append((came, piece))
        except BadReply as error:
            failure = error
        # Also of what failed: a server may say why before it breaks off.
        if sum(len(piece) for _, piece in stamped) > WHOLE_BYTES:
            await asyncio.to_thread(_read, stamped, record)
        else:
            _read(stamped, record)
        if failure is not None and not record.is_done:
            raise failure
        record.check_whole(n_choices)

    async def _whole(self, method: str, path: str) -> bytes:
        with _failures():
            limit = aiohttp.ClientTimeout(total=min(WHOLE_LIMIT_S, self._silence_limit_s))
            async with self._http.request(method, self.address + path, timeout=limit) as reply:
                text = await reply.read()
        if not reply.ok:
            raise _refusal(reply.status, text)
        return text


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _read(stamped: list[tuple[float, bytes]], record: Record) -> None:
    """Raises ``BadReply``."""
    reader = EventReader()
    came = 0.0
    for stamp, piece in stamped:
        came = stamp - record.started
        for data in reader.push(piece):
            record.take(data, came)
    for data in reader.finish():
        record.take(data, came)


def _refusal(status: int, text: bytes) -> BadReply:
    remedy = "; give the server's key with --api-key" if status == 401 else ""
    return BadReply(f"http_{status}", f"HTTP status {status}: {text.decode('utf-8', 'replace')[:300]}{remedy}")


@contextmanager
def _failures() -> Iterator[None]:
    """What can go wrong on the way to a server, as ``BadReply``."""
    try:
        yield
    except TimeoutError as error:  # aiohttp's are of several kinds
        raise BadReply("timeout", _reason(error)) from None
    except aiohttp.ClientConnectorError as error:
        raise BadReply("connect", _reason(error)) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise BadReply("disconnect", _reason(error)) from None
    except aiohttp.ClientResponseError as error:  # something answers, but not as HTTP has it
        raise BadReply("stream", _reason(error)) from None
    except (aiohttp.ClientError, ValueError) as error:
        raise BadReply("connect", _reason(error)) from None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
