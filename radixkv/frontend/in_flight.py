"""What is asked of the runtime, and what has come of it.

What a choice gained and nobody took yet is one buffer, so that a slow reader costs at most its answer's own tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from radixkv.errors import RequestError
from radixkv.sampling import SamplingParams
from radixkv.wire import Done, NewTokens, PromptLogprobs, TokenLogprobs

_INLINE_WORK = 256
"""What takes longer than so many tokens without log-probabilities is done in a thread."""
_WORK_OF_FIGURES = 8
"""A token's log-probabilities, in tokens without."""
_LOGPROB_BYTES = 16


class Latencies(Protocol):
    """Where measured times and ends go."""

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first token."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """From an answer's last token to the ``count`` tokens after it."""
        ...

    def done(self, seconds: float, queue_seconds: float) -> None:
        """A whole answer, and how long its request had waited."""
        ...

    def ended(self, reason: str, count: int = 1) -> None:
        """``count`` answers have ended: by ``stop`` or ``length``, ``abort`` of a client, or an ``error``."""
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


class Delta(msgspec.Struct):
    """What one choice gained since it was last looked at; whoever takes it owns it."""

    prompt: int
    """The prompt's place in the batch."""
    choice: int
    """Which of the prompt's ``n`` answers."""
    tokens: bytearray = msgspec.field(default_factory=bytearray)
    """Little-endian int32 ids."""
    logprobs: list[TokenLogprobs] = []
    """One a token, if the request asks for them."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while more may come."""
    stop_token_id: int | None = None
    """The token that ended it, if one did; the last of ``tokens``."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of the prompt's next tokens, in order from the second on; they come with choice 0, before its first token."""
    done: Done | None = None
    """How the whole request ended; with the last delta of its last choice."""


class Answer:
    """One request in flight: the ``n`` choices of a prompt."""

    def __init__(self, prompt: int, n: int, wake: asyncio.Event, arrived: float, *, streams: bool) -> None:
        self.id = uuid.uuid4().hex
        self.streams = streams
        """Whether a client reads what it gains at once. A whole reply is held up by this process alone."""
        self.n_pending_bytes = 0
        """What its choices gained and nobody took. No reader could have taken figures of the prompt sooner."""
        self.done: Done | None = None
        self.error: RequestError | None = None
        self._prompt = prompt
        self._wake = wake
        self._arrived = arrived
        self._open = set(range(n))
        """Choices that have not ended."""
        self._last_token_at: dict[int, float] = {}
        """By choice."""
        self._gained: dict[int, Delta] = {}
        """By choice: what nobody took."""

    def gain(self, item: NewTokens, latencies: Latencies) -> None:
        """New tokens of a choice have come, or its end."""
        if item.tokens:
            self._measure(item, latencies)
        gained = self._gained_by(item.choice)
        gained.tokens += item.tokens
        self.n_pending_bytes += len(item.tokens)
        if item.logprobs:
            gained.logprobs += item.logprobs
            self.n_pending_bytes += _n_bytes(item.logprobs)
        if item.finish_reason is not None:
            gained.finish_reason, gained.stop_token_id = item.finish_reason, item.stop_token_id
            self._open.discard(item.choice)
        self._wake.set()

    def gain_prompt(self, item: PromptLogprobs) -> None:
        """The next stretch of the prompt has been scored."""
        self._gained_by(0).prompt_logprobs += item.items
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
        if self.done is not None:
            self._gained_by(next(reversed(self._gained), 0)).done = self.done
        deltas, self._gained = list(self._gained.values()), {}
        self.n_pending_bytes = 0
        return deltas

    def _gained_by(self, choice: int) -> Delta:
        gained = self._gained.get(choice)
        if gained is None:
            gained = self._gained[choice] = Delta(self._prompt, choice)
        return gained

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


def without_answer(delta: Delta) -> Delta:
    """The delta of a prompt to which no answer is wanted: the one token that it took is not shown."""
    reason = None if delta.finish_reason is None else "length"
    return msgspec.structs.replace(delta, tokens=bytearray(), logprobs=[], stop_token_id=None, finish_reason=reason)


def is_long(delta: Delta) -> bool:
    """Whether to word what came takes so long that a thread should do it."""
    return is_much(len(delta.tokens) // 4, len(delta.logprobs) + len(delta.prompt_logprobs))


def is_much(n_tokens: int, n_figures: int) -> bool:
    """Whether tokens with so many log-probabilities are more than are rendered on the event loop."""
    return n_tokens + _WORK_OF_FIGURES * n_figures > _INLINE_WORK
