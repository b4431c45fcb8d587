"""What is asked of the runtime, and what has come of it.

What a choice gained and nobody took yet is one buffer, so that a slow reader costs at most its answer's own tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.errors import RequestError
from radixkv.sampling import SamplingParams
from radixkv.wire import Done, NewTokens, PromptLogprobs, TokenLogprobs

_LOGPROB_BYTES = 16


class Latencies(Protocol):
    """Where measured times go."""

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first token."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """From an answer's last token to the ``count`` tokens after it."""
        ...

    def done(self, seconds: float, queue_seconds: float) -> None:
        """A whole answer, and how long its request had waited."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be submitted."""

    tokens: bytes
    """Little-endian int32 ids."""
    sampling: SamplingParams
    """Of its ``n`` choices."""
    cache_salt: str = ""
    reads_cache: bool = True
    priority: int = 0


@dataclass(frozen=True)
class Delta:
    """What one choice gained since it was last looked at."""

    prompt: int
    """The prompt's place in the batch."""
    choice: int
    """Which of the prompt's ``n`` answers."""
    tokens: bytes = b""
    logprobs: Sequence[TokenLogprobs] = ()
    """One a token, if the request asks for them."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while more may come."""
    stop_token_id: int | None = None
    """The token that ended it, if one did; the last of ``tokens``."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of the prompt's next tokens, in order from the second on; they come with choice 0, before its first token."""
    done: Done | None = None
    """How the whole request ended; with the last delta of its last choice."""


@dataclass
class _Gained:
    """What a choice gained and nobody took."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None

    def delta(self, prompt: int, choice: int, done: Done | None) -> Delta:
        return Delta(
            prompt,
            choice,
            bytes(self.tokens),
            self.logprobs,
            self.finish_reason,
            self.stop_token_id,
            self.prompt_logprobs,
            done,
        )


class Answer:
    """One request in flight: the ``n`` choices of a prompt."""

    def __init__(self, prompt: int, n: int, wake: asyncio.Event, arrived: float) -> None:
        self.id = uuid.uuid4().hex
        self.n_pending_bytes = 0
        """What it gained and nobody took."""
        self.done: Done | None = None
        self.error: RequestError | None = None
        self._prompt = prompt
        self._wake = wake
        self._arrived = arrived
        self._open = set(range(n))
        """Choices that have not ended."""
        self._last_token_at: dict[int, float] = {}
        """By choice."""
        self._gained: dict[int, _Gained] = {}
        """By choice."""

    def gain(self, item: NewTokens, latencies: Latencies) -> None:
        """New tokens of a choice have come, or its end."""
        if item.tokens:
            self._measure(item, latencies)
        gained = self._gained.setdefault(item.choice, _Gained())
        gained.tokens += item.tokens
        gained.logprobs += item.logprobs or ()
        self.n_pending_bytes += len(item.tokens) + _n_bytes(item.logprobs or ())
        if item.finish_reason is not None:
            gained.finish_reason, gained.stop_token_id = item.finish_reason, item.stop_token_id
            self._open.discard(item.choice)
        self._wake.set()

    def gain_prompt(self, item: PromptLogprobs) -> None:
        """The next stretch of the prompt has been scored."""
        self._gained.setdefault(0, _Gained()).prompt_logprobs += item.items
        self.n_pending_bytes += _n_bytes(item.items)
        self._wake.set()

    def end(self, done: Done, latencies: Latencies) -> None:
        """Its terminal message has come."""
        self.done = done
        if not self._open:
            latencies.done(time.monotonic() - self._arrived, done.queue_time_s)
        self._wake.set()

    def fail(self, error: RequestError) -> None:
        """It ended without an answer."""
        self.error = error
        self._wake.set()

    def take(self) -> list[Delta]:
        """What came since the last time. Raises the error that it ended with."""
        if self.error is not None:
            raise self.error
        if not self._gained and self.done is not None:
            self._gained[0] = _Gained()
        last = len(self._gained) - 1
        deltas = [
            gained.delta(self._prompt, choice, self.done if place == last else None)
            for place, (choice, gained) in enumerate(self._gained.items())
        ]
        self._gained = {}
        self.n_pending_bytes = 0
        return deltas

    def _measure(self, item: NewTokens, latencies: Latencies) -> None:
        now = time.monotonic()
        if not self._last_token_at:
            latencies.first_token(now - self._arrived)
        elif (last := self._last_token_at.get(item.choice)) is not None:
            latencies.next_tokens(now - last, len(item.tokens) // 4)
        self._last_token_at[item.choice] = now


def _n_bytes(items: Sequence[TokenLogprobs]) -> int:
    """About how much memory they take."""
    return sum(_LOGPROB_BYTES + len(item.top_ids) + len(item.top_logprobs) for item in items)
