"""The load generator: sends sessions to an OpenAI-compatible server and times what streams back."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec

from radixkv.bench.events import EventReader
from radixkv.bench.record import BadReply, Measurement, Record
from radixkv.errors import ConfigError
from radixkv.progress import Progress

SILENCE_LIMIT_S = 600.0
"""A request whose server sends nothing for longer has failed."""

Session = tuple[str, ...]
"""What a client says in each turn. A turn's prompt is all that was said before, the answers too, and this."""


def server_address(base_url: str) -> str:
    """The address of a server, given with or without the final ``/v1``. Raises ``ConfigError``."""
    address = base_url.rstrip("/").removesuffix("/v1")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"base URL {base_url!r} is not an address; give one such as http://127.0.0.1:8000")
    try:
        _ = urlsplit(address).port
    except ValueError as error:
        raise ConfigError(f"base URL {base_url!r} has no usable port: {error}") from None
    return address


@dataclass(frozen=True)
class Load:
    """How sessions are sent."""

    model: str
    output_len: int
    max_concurrency: int
    """Most requests in flight."""
    request_rate: float = math.inf
    """Sessions that begin in a second on average, as a Poisson process; infinite: all at once."""
    seed: int = 0
    """Of the arrival times."""

    def arrivals(self, count: int) -> Iterator[float]:
        """When each session begins, in seconds after the start."""
        rng = random.Random(self.seed)
        at = 0.0
        for _ in range(count):
            yield at
            if math.isfinite(self.request_rate):
                at += rng.expovariate(self.request_rate)


class LoadGenerator:
    """A client of one server. Use it as ``async with``.

    Args:
        base_url: the server's address, with or without the final ``/v1``.
        api_key: sent as ``Authorization: Bearer``.
        use_environment: whether proxies and certificates of the environment apply.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, use_environment: bool = False) -> None:
        self._address = server_address(base_url)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENCE_LIMIT_S, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            trust_env=use_environment,
        )

    async def __aenter__(self) -> LoadGenerator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The name of the first model that the server serves.

        Raises:
            ConfigError: nothing that answers like an OpenAI-compatible server is there.
        """
        url = f"{self._address}/v1/models"
        try:
            reply = await self._client.get(url)
            reply.raise_for_status()
            return msgspec.json.decode(reply.content, type=_Models).data[0].id
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"{url} does not answer: {_reason(error)}; is the server running?") from None
        except (msgspec.MsgspecError, IndexError):
            raise ConfigError(f"{url} does not list a model; give an OpenAI-compatible server") from None

    async def flush(self) -> bool:
        """Empties the server's prefix cache; whether it has an endpoint for that and did."""
        try:
            reply = await self._client.post(f"{self._address}/flush_cache")
        except httpx.HTTPError:
            return False
        return reply.is_success

    async def run(self, sessions: Sequence[Session], load: Load, progress: Progress | None = None) -> Measurement:
        """Sends every turn of every session and waits for all answers.

        A turn is sent when the answer to the one before is there. A request that fails says so in its record, and
        ends its session.
        """
        room = asyncio.Semaphore(load.max_concurrency)
        start = time.perf_counter()
        done: list[Record] = []

        async def ask(prompt: str) -> Record:
            async with room:
                record = await self._complete(prompt, load)
            done.append(record)
            if progress is not None:
                progress.show(len(done), sum(each.n_output_tokens for each in done))
            return record

        async def one(session: Session, arrival: float) -> list[Record]:
            delay = start + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            text = ""
            records: list[Record] = []
            for said in session:
                if records and records[-1].error is not None:
                    records.append(Record(error="not sent: the turn before it failed"))
                    continue
                text += said
                records.append(await ask(text))
                text += records[-1].text
            return records

        arrivals = load.arrivals(len(sessions))
        records = await asyncio.gather(*(one(*pair) for pair in zip(sessions, arrivals, strict=True)))
        return Measurement(
            records=list(itertools.chain.from_iterable(records)), duration=time.perf_counter() - start
        )

    async def _complete(self, prompt: str, load: Load) -> Record:
        body = {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        record = Record(started=time.perf_counter())
        try:
            await self._stream(body, record)
        except (httpx.HTTPError, BadReply) as error:
            record.error = _reason(error)
        return record

    async def _stream(self, body: object, record: Record) -> None:
        reader = EventReader()
        async with self._client.stream(
            "POST",
            f"{self._address}/v1/completions",
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json"},
        ) as reply:
            if not reply.is_success:
                text = (await reply.aread()).decode("utf-8", "replace")
                raise BadReply(f"HTTP status {reply.status_code}: {text[:300]}")
            ended = False
            async for piece in reply.aiter_bytes():  # to the end, so that the connection can be used again
                for data in reader.push(piece):
                    ended = ended or record.take(data)
            for data in reader.finish():
                ended = ended or record.take(data)
        if not ended:
            raise BadReply("the stream ended without [DONE]")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
