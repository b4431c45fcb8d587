"""Requests in flight, with the output that waits to be read.

The unread output of a choice is merged into one delta, so a slow reader costs at most the memory of its own tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from radixkv.errors import RequestError
from radixkv.frontend.arrival import Arrival
from radixkv.wire.messages import ComputedPrompt, Done, NewTokens, PromptLogprobs, Submit, TokenLogprobs

REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""What the ids of replies begin with, before the id of their first prompt: in OpenAI's chats, completions,
Anthropic's Messages and Responses. Those of ``/generate`` are the id itself."""
_INLINE_WORK = 256
"""Rendering work done on the event loop, in tokens without logprobs; a thread renders more."""
_TOKENS_PER_LOGPROB = 8
"""Cost of rendering one token's logprobs, in tokens without."""
_UNREAD_BYTES = 256
"""Unread output of an answer that is sent whole: 64 tokens, which take less time together than one by one."""
_LOGPROB_BYTES = 16
"""About the memory of a ``TokenLogprobs`` beside its lists."""


class RequestMetrics(Protocol):
    """Records latencies and finish reasons."""

    def first_token(self, seconds: float) -> None:
        """Records the time from a request's arrival to its first token."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """Records the time between a choice's last token and the next ``count`` tokens."""
        ...

    def done(self, seconds: float, queue_seconds: float) -> None:
        """Records the end-to-end latency of a request and its time in the queue."""
        ...

    def ended(self, reason: str, count: int = 1) -> None:
        """Counts ``count`` choices that ended by ``reason``.

        The reasons are ``stop``, ``length``, ``abort`` (the client left) and ``error``.
        """
        ...


class EndedRequest(NamedTuple):
    """How a prompt's request to the runtime ended, without any text."""

    prompt: Submit
    """As it was sent."""
    arrival: Arrival
    sent_at: float
    """When it was sent to the runtime, in monotonic seconds."""
    first_token_at: float | None
    """In monotonic seconds; None if there was no token."""
    ended_at: float
    """In monotonic seconds."""
    n_output: int
    """Tokens of all choices."""
    done: Done | None
    """The runtime's terminal message; None if the request or the runtime failed, or the client left, first."""
    finish_reasons: tuple[str, ...]
    """The finish reason of each choice that ended, in order of their ends."""
    error_code: str | None
    """Code of the error that ended the request."""
    client_left: bool
    """Whether it ended because the client disconnected."""

    @property
    def cached_tokens(self) -> dict[str, int] | None:
        """Prompt tokens that were not computed, by the tier that they came from; None if ``done`` is."""
        return None if self.done is None else self.done.cache_use.by_source(has_disk=True)


class TokenDelta(msgspec.Struct):
    """New output of one choice since its reader last took any. The reader owns it."""

    prompt: int
    """The prompt's index in the request group."""
    choice: int
    """The choice's index among the prompt's ``n``."""
    tokens: bytearray = msgspec.field(default_factory=bytearray)
    """Little-endian int32 ids."""
    logprobs: list[TokenLogprobs] = []
    """One per token, if the request has ``logprobs``."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while the choice is running."""
    stop_token_id: int | None = None
    """The token that ended the choice, if one did; it is the last of ``tokens``."""
    prompt_logprobs: list[TokenLogprobs] = []
    """The prompt's next logprobs, in order from its second token on.

    They come with choice 0, before its first token.
    """
    pooled: bytes | None = None
    """What the runtime reports of a prompt without an answer, with the end of choice 0."""
    computed: ComputedPrompt | None = None
    """What the cache gave and got of the prompt. It comes with choice 0, before or with its first token."""
    done: Done | None = None
    """How the whole request ended; set in the last delta of its last choice.

    No delta has it if the request failed after all choices had ended for the client.
    """


class DirectReader(Protocol):
    """Takes output in place of a waiting task, which costs no turn of the event loop."""

    def take(self) -> bool:
        """Takes what has arrived, and keeps the part of a response that it makes; False: only a task can."""
        ...

    def write(self) -> None:
        """Writes the part that was kept."""
        ...


class WakeUp:
    """An ``asyncio.Event`` for one waiter, which clears it: without a queue of waiters, since every chunk waits."""

    def __init__(self) -> None:
        self.reader: DirectReader | None = None
        """Is asked first while the waiter waits; its errors are raised in the waiter."""
        self._loop = asyncio.get_running_loop()
        self._is_set = False
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wakes the waiter, or lets it not wait."""
        self._is_set = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def take(self) -> bool:
        """Lets the reader take what has arrived, or else wakes the waiter; returns whether to call ``write``."""
        if self.reader is not None and self._waiting is not None and not self._waiting.done():
            try:
                if self.reader.take():
                    return True
            except Exception as error:
                self._waiting.set_exception(error)
                return False
        self.set()
        return False

    def write(self) -> None:
        """Writes what the reader took in ``take``, before the waiter runs again."""
        assert self.reader is not None, "take comes first"
        try:
            self.reader.write()
        except Exception as error:
            assert self._waiting is not None, "take comes first"
            if not self._waiting.done():
                self._waiting.set_exception(error)

    async def wait(self) -> None:
        """Waits until ``set`` has been called since the last call."""
        if not self._is_set:
            self._waiting = self._loop.create_future()
            await self._waiting
        self._is_set = False


class InFlightRequest:
    """One prompt that the runtime works on, with its ``n`` choices.

    Args:
        index: the prompt's index in the request group.
        prompt: as it is sent.
        wake: set when the request fails. Whoever adds output sets it, once for all that arrives together.
        arrived: when and where the HTTP request arrived.
        streams: whether a client reads output as it arrives.
    """

    def __init__(self, index: int, prompt: Submit, wake: WakeUp, arrived: Arrival, *, streams: bool) -> None:
        self.index = index
        self.prompt = prompt
        self.id = prompt.id
        self.streams = streams
        """Whether a client reads output as it arrives. Otherwise only this process delays the reading."""
        self.n_pending_bytes = 0
        """Size of the choices' unread output.

        Prompt logprobs do not count: no reader could have taken them sooner.
        """
        self.load = 1.0
        """How much it counts where runtimes are compared by what they have to do."""
        self.done: Done | None = None
        self.error: RequestError | None = None
        self.finish_reasons: list[str] = []
        """The finish reasons of the choices that have ended for the client."""
        self.wake = wake
        """Wakes the reader."""
        self._arrived = arrived
        self._sent_at = time.monotonic()
        self._first_token_at: float | None = None
        self._ended_at: float | None = None
        self._n_output = 0
        self._open = set(range(prompt.sampling.n))
        """Choices that have not ended."""
        self._last_token_at: dict[int, float] = {}
        """Time of each choice's last token, in monotonic seconds."""
        self._unread_work = 0
        """How long rendering the unread output takes, in tokens without logprobs."""
        self._deltas: dict[int, TokenDelta] = {}
        """Unread output by choice."""

    @property
    def is_reported(self) -> bool:
        """Whether a client sent the request, and not the server itself."""
        return bool(self._arrived.route)

    @property
    def request_id(self) -> str:
        """The ``X-Request-Id`` of its HTTP request; empty for a request of the server itself."""
        return self._arrived.request_id

    def has_name(self, name: str) -> bool:
        """Returns whether a client knows it by this name: the id of its reply, or its ``X-Request-Id``.

        The prompts of one HTTP request have both in common; the id of a prompt alone is a name, too. O(name).

        Args:
            name: not empty.
        """
        if name == self.request_id:
            return True
        reply = next((name[len(prefix) :] for prefix in REPLY_PREFIXES if name.startswith(prefix)), name)
        return self.id == reply or (self.id.startswith(f"{reply}-") and self.id[len(reply) + 1 :].isdecimal())

    @property
    def has_begun(self) -> bool:
        """Whether a token of an answer has come."""
        return self._first_token_at is not None

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended for the client. The runtime may not know yet, as at a stop string."""
        return len(self.finish_reasons) == self.prompt.sampling.n

    @property
    def is_over(self) -> bool:
        """Whether no more output comes."""
        return self.done is not None or self.error is not None

    @property
    def may_wait(self) -> bool:
        """Whether output of running choices may stay unread until more comes: nobody and no stop string waits."""
        return not self.streams and not self.prompt.sampling.stop and self.n_pending_bytes < _UNREAD_BYTES

    @property
    def is_quick(self) -> bool:
        """Whether more output comes, and the event loop may render what has come."""
        return self._unread_work <= _INLINE_WORK and self.done is None and self.error is None

    def add_tokens(self, item: NewTokens, metrics: RequestMetrics, now_s: float) -> None:
        """Adds new tokens of a choice, or its end. The metrics leave out tokens of the canary.

        Args:
            item: the tokens.
            metrics: records their times.
            now_s: when they arrived, in monotonic seconds.
        """
        if item.tokens and not self.prompt.is_canary:
            self._n_output += len(item.tokens) // 4
            self._measure(item, metrics, now_s)
        delta = self._delta_of(item.choice)
        delta.tokens += item.tokens
        delta.pooled = item.pooled
        self.n_pending_bytes += len(item.tokens)
        self._unread_work += len(item.tokens) // 4
        if item.logprobs:
            delta.logprobs += item.logprobs
            self.n_pending_bytes += _n_bytes(item.logprobs)
            self._unread_work += _TOKENS_PER_LOGPROB * len(item.logprobs)
        if item.finish_reason is not None:
            delta.finish_reason, delta.stop_token_id = item.finish_reason, item.stop_token_id
            self._open.discard(item.choice)

    def add_prompt_logprobs(self, item: PromptLogprobs) -> None:
        """Adds logprobs of the prompt's next tokens."""
        self._delta_of(0).prompt_logprobs += item.items
        self._unread_work += _TOKENS_PER_LOGPROB * len(item.items)

    def add_computed(self, computed: ComputedPrompt) -> None:
        """Adds what the cache gave and got of the prompt; tokens follow."""
        self._delta_of(0).computed = computed

    def end(self, done: Done, metrics: RequestMetrics) -> None:
        """Ends the request as its terminal message says."""
        self.done = done
        self._ended_at = time.monotonic()
        if not self._open and not self.prompt.is_canary:
            metrics.done(self._ended_at - self._arrived.at, done.queue_time_s)

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, and wakes the reader."""
        self.error = error
        self._ended_at = time.monotonic()
        self.wake.set()

    def take_deltas(self) -> list[TokenDelta]:
        """Returns the output since the last call, one delta per choice.

        Raises the error that ended the request, unless all answers have ended: it would be a second ending.
        """
        if self.error is not None and not self.is_complete:
            raise self.error
        if self.done is not None:
            self._delta_of(next(reversed(self._deltas), 0)).done = self.done
        deltas, self._deltas = list(self._deltas.values()), {}
        self.n_pending_bytes = self._unread_work = 0
        return deltas

    def report(self, error: BaseException | None) -> EndedRequest:
        """Returns how the request ended.

        Args:
            error: what ended its request group; None if nothing did before all choices had ended.
        """
        own_error = self.error or error
        code = own_error.code if isinstance(own_error, RequestError) else RequestError.code
        return EndedRequest(
            self.prompt,
            self._arrived,
            self._sent_at,
            self._first_token_at,
            time.monotonic() if self._ended_at is None else self._ended_at,
            self._n_output,
            self.done,
            tuple(self.finish_reasons),
            None if self.is_complete or not isinstance(own_error, Exception) else code,
            client_left=not self.is_complete and own_error is not None and not isinstance(own_error, Exception),
        )

    def _delta_of(self, choice: int) -> TokenDelta:
        delta = self._deltas.get(choice)
        if delta is None:
            delta = self._deltas[choice] = TokenDelta(self.index, choice)
        return delta

    def _measure(self, item: NewTokens, metrics: RequestMetrics, now_s: float) -> None:
        if not self._last_token_at:
            self._first_token_at = now_s
            metrics.first_token(now_s - self._arrived.at)
        elif (last := self._last_token_at.get(item.choice)) is not None:
            metrics.next_tokens(now_s - last, len(item.tokens) // 4)
        self._last_token_at[item.choice] = now_s


def _n_bytes(items: Sequence[TokenLogprobs]) -> int:
    """Returns about how much memory the items take."""
    return sum(_LOGPROB_BYTES + len(item.top_ids) + len(item.top_logprobs) for item in items)


def without_output(delta: TokenDelta) -> TokenDelta:
    """Returns the delta of a prompt-only request, without the one token that it had to generate."""
    reason = None if delta.finish_reason is None else "length"
    return msgspec.structs.replace(delta, tokens=bytearray(), logprobs=[], stop_token_id=None, finish_reason=reason)


def is_slow_to_render(delta: TokenDelta) -> bool:
    """Returns whether a thread should render the delta, because that takes too long for the event loop."""
    return exceeds_inline_work(len(delta.tokens) // 4, len(delta.logprobs) + len(delta.prompt_logprobs))


def exceeds_inline_work(n_tokens: int, n_logprobs: int) -> bool:
    """Returns whether rendering this many tokens and logprobs takes too long for the event loop."""
    return n_tokens + _TOKENS_PER_LOGPROB * n_logprobs > _INLINE_WORK
