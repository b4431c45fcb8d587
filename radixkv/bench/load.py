"""The load generator: sends prompts to an OpenAI-compatible server and times what streams back."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from radixkv.bench.events import EventReader
from radixkv.errors import ConfigError, RadixKVError

SILENCE_LIMIT_S = 600.0
"""A request whose server sends nothing for longer has failed."""


class BadReply(RadixKVError):
    """A server's reply that is an error, or that ends early."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """What the generator reads of one event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass
class Record:
    """What one request met. Times are seconds; the clock starts when the request is sent."""

    started: float = 0.0
    """On the clock of ``time.perf_counter``."""
    arrivals: list[float] = field(default_factory=list)
    """When each piece of output came, since ``started``."""
    usage: Usage | None = None
    text: str = ""
    prompt_token_ids: list[int] | None = None
    """None: the server does not return them."""
    token_ids: list[int] | None = None
    error: str | None = None
    """Why it failed, if it did."""

    @property
    def ttft(self) -> float:
        """Time to the first piece."""
        return self.arrivals[0]

    @property
    def latency(self) -> float:
        """Time to the last piece."""
        return self.arrivals[-1]

    @property
    def itl(self) -> list[float]:
        """The gaps between pieces."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def n_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def n_output_tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else 0

    @property
    def n_cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None: the server does not say."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None for an answer of one token."""
        later = self.n_output_tokens - 1
        return (self.latency - self.ttft) / later if later > 0 else None


@dataclass(frozen=True)
class Measurement:
    """What a run met."""

    records: Sequence[Record]
    """One a prompt, in their order."""
    duration: float
    """Seconds from the first request to the last answer."""


@dataclass(frozen=True)
class Load:
    """How prompts are sent."""

    model: str
    output_len: int
    max_concurrency: int
    request_rate: float = math.inf
    """Requests a second on average, arriving as a Poisson process; infinite: all at once."""
    seed: int = 0
    """Of the arrival times."""

    def arrivals(self, count: int) -> Iterator[float]:
        """When each request arrives, in seconds after the start."""
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
        use_environment: whether proxies and certificates of the environment apply.
    """

    def __init__(self, base_url: str, *, use_environment: bool = False) -> None:
        self._address = base_url.rstrip("/").removesuffix("/v1")
        if not self._address.startswith(("http://", "https://")):
            raise ConfigError(f"base URL {base_url!r} is not an address; give one such as http://127.0.0.1:8000")
        try:
            _ = urlsplit(self._address).port
        except ValueError as error:
            raise ConfigError(f"base URL {base_url!r} has no usable port: {error}") from None
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENCE_LIMIT_S, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
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

    async def run(self, prompts: Sequence[str], load: Load) -> Measurement:
        """Sends all prompts and waits for every answer. A request that fails says so in its record."""
        room = asyncio.Semaphore(load.max_concurrency)
        start = time.perf_counter()

        async def one(prompt: str, arrival: float) -> Record:
            delay = start + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            async with room:
                return await self._complete(prompt, load)

        arrivals = load.arrivals(len(prompts))
        records = await asyncio.gather(*(one(*pair) for pair in zip(prompts, arrivals, strict=True)))
        return Measurement(records=records, duration=time.perf_counter() - start)

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
                    ended = ended or _take(record, data)
            for data in reader.finish():
                ended = ended or _take(record, data)
        if not ended:
            raise BadReply("the stream ended without [DONE]")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _take(record: Record, data: bytes) -> bool:
    """Adds an event to the record; whether it was the stream's last."""
    now = time.perf_counter() - record.started
    if data == b"[DONE]":
        if not record.arrivals:
            raise BadReply("the stream brought no output")
        if record.usage is None:
            raise BadReply("the stream brought no usage; the server must support stream_options.include_usage")
        return True
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadReply(f"an event is not a completion chunk: {error}") from None
    if chunk.error is not None:
        raise BadReply(f"the server reported {msgspec.json.encode(chunk.error).decode()[:300]}")
    record.usage = chunk.usage or record.usage
    for choice in chunk.choices:
        if choice.prompt_token_ids is not None:
            record.prompt_token_ids = choice.prompt_token_ids
        if choice.token_ids is not None:
            record.token_ids = (record.token_ids or []) + choice.token_ids
        record.text += choice.text or ""
        # Some servers end with an event of its own, which is no token; an answer without text has only that.
        if choice.text or choice.token_ids or (choice.finish_reason and not record.arrivals):
            record.arrivals.append(now)
    return False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
