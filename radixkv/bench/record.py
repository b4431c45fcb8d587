"""What a request met: the events of its answer, and when they came."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixkv.errors import RadixKVError


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

    def take(self, data: bytes) -> bool:
        """Adds an event; whether it was the stream's last. Raises ``BadReply``."""
        now = time.perf_counter() - self.started
        if data == b"[DONE]":
            if not self.arrivals:
                raise BadReply("the stream brought no output")
            if self.usage is None:
                raise BadReply("the stream brought no usage; the server must support stream_options.include_usage")
            return True
        try:
            chunk = msgspec.json.decode(data, type=Chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadReply(f"an event is not a completion chunk: {error}") from None
        if chunk.error is not None:
            raise BadReply(f"the server reported {msgspec.json.encode(chunk.error).decode()[:300]}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self._add(choice, now)
        return False

    def _add(self, choice: Choice, now: float) -> None:
        if choice.prompt_token_ids is not None:
            self.prompt_token_ids = choice.prompt_token_ids
        if choice.token_ids is not None:
            self.token_ids = (self.token_ids or []) + choice.token_ids
        self.text += choice.text or ""
        # Some servers end with an event of its own, which is no token; an answer without text has only that.
        if choice.text or choice.token_ids or (choice.finish_reason and not self.arrivals):
            self.arrivals.append(now)


@dataclass(frozen=True)
class Measurement:
    """What a run met."""

    records: Sequence[Record]
    """One a turn, in the order of sessions and their turns."""
    duration: float
    """Seconds from the first request to the last answer."""
