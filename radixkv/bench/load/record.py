"""What a request met: the pieces of its answers, and when they came."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from radixkv.bench.load.chunks import BadReply, Choice, Usage, read_chunk, read_token_ids


@dataclass
class Answer:
    """One choice of a request."""

    text: str = ""
    token_ids: list[int] | None = None
    """None: the server does not return them."""
    arrivals: list[float] = field(default_factory=list)
    """When each piece came, in seconds after the request was sent."""
    finish_reason: str | None = None
    """Why it ended; None: it has not."""


@dataclass
class Record:
    """What one request met. Moments are seconds on the clock of ``time.perf_counter``."""

    session: int = 0
    """Its session's place in the run."""
    turn: int = 0
    """Its turn's place in the session."""
    started: float = 0.0
    """When it was sent."""
    scheduled: float | None = None
    """When it should have been sent, in an open loop: its latencies count from here. None: in a closed loop."""
    answers: list[Answer] = field(default_factory=list)
    """One a choice."""
    usage: Usage | None = None
    prompt_token_ids: array[int] | None = None
    """As int32, since a run may have millions. None: the server does not return them, or they are not read yet."""
    unread_prompt: bytes | None = None
    """The same as JSON, until ``read_prompt``."""
    is_done: bool = False
    """Whether its stream said ``[DONE]``, which some servers leave out."""
    is_right: bool | None = None
    """Whether the answers are; None: there is nothing to compare them with."""
    error: str | None = None
    """Why it failed, if it did."""
    error_kind: str | None = None
    """``connect``, ``disconnect``, ``timeout``, ``http_`` and the status, ``server`` (reported in the stream),
    ``stream`` (a reply that is not as it should be), ``prompt`` (it cannot be encoded), ``not_sent`` (because
    another failed, or the run was ended), ``stopped`` (the run was ended meanwhile)."""

    @property
    def waited(self) -> float:
        """How much later it was sent than it should have been."""
        return 0.0 if self.scheduled is None else self.started - self.scheduled

    @property
    def arrivals(self) -> list[float]:
        """When each piece of any answer came, in seconds after the request was sent."""
        return sorted(itertools.chain.from_iterable(answer.arrivals for answer in self.answers))

    @property
    def texts(self) -> tuple[str, ...]:
        """Of the answers."""
        return tuple(answer.text for answer in self.answers)

    @property
    def token_ids(self) -> list[list[int]] | None:
        """Of the answers; None: the server does not return them."""
        ids = [answer.token_ids for answer in self.answers if answer.token_ids is not None]
        return ids if ids and len(ids) == len(self.answers) else None

    @property
    def ttft(self) -> float:
        """Time to the first piece."""
        return self.waited + min(answer.arrivals[0] for answer in self.answers)

    @property
    def latency(self) -> float:
        """Time to the last piece."""
        return self.waited + max(answer.arrivals[-1] for answer in self.answers)

    @property
    def itl(self) -> list[float]:
        """The gaps between pieces of the same answer."""
        return [
            later - earlier for answer in self.answers for earlier, later in itertools.pairwise(answer.arrivals)
        ]

    @property
    def n_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def n_output_tokens(self) -> int:
        """Of all answers."""
        return self.usage.completion_tokens if self.usage else 0

    @property
    def n_cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None: the server does not say."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def tpot(self) -> float | None:
        """Time per token of an answer after the first; None for answers of one token."""
        later = self.n_output_tokens / max(len(self.answers), 1) - 1
        return (self.latency - self.ttft) / later if later > 0 else None

    def take(self, data: bytes, came: float) -> None:
        """Adds an event that came so many seconds after the request was sent.

        Raises:
            BadReply: it is an error, or not what a stream may hold.
        """
        if self.is_done:
            return
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = read_chunk(data)
        self.usage = chunk.usage or self.usage
        self._note_prompt(chunk.prompt_token_ids)
        for choice in chunk.choices:
            self._add(choice, came)

    def check_whole(self, n_choices: int) -> None:
        """Raises ``BadReply`` if something is missing now that the stream has ended.

        Args:
            n_choices: as many answers as were asked for.
        """
        has_ends = bool(self.answers) and all(answer.finish_reason is not None for answer in self.answers)
        if not self.is_done and not has_ends:
            raise BadReply("stream", "the stream ended early, without a finish_reason and without [DONE]")
        if not self.answers or not all(answer.arrivals for answer in self.answers):
            raise BadReply("stream", "the stream brought no output")
        if len(self.answers) != n_choices:
            raise BadReply("stream", f"the stream brought {len(self.answers)} of {n_choices} choices (n)")
        if self.usage is None:
            raise BadReply(
                "stream", "the stream brought no usage; the server must support stream_options.include_usage"
            )

    def read_prompt(self) -> None:
        """Reads the prompt's token ids, which nobody needs while requests are in flight.

        Raises:
            BadReply: they are none.
        """
        text, self.unread_prompt = self.unread_prompt, None
        if text is not None:
            self.prompt_token_ids = read_token_ids(text)

    def _note_prompt(self, ids: msgspec.Raw) -> None:
        text = bytes(ids)  # the Raw itself would keep all of the event
        if text not in (b"null", b"[]"):
            self.unread_prompt = text

    def _add(self, choice: Choice, came: float) -> None:
        while len(self.answers) <= choice.index:
            self.answers.append(Answer())
        answer = self.answers[choice.index]
        self._note_prompt(choice.prompt_token_ids)
        if choice.token_ids is not None:
            answer.token_ids = answer.token_ids or []
            answer.token_ids += choice.token_ids
        answer.text += choice.said
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        # Some servers end with an event of its own, which is no token; an answer without text has only that.
        if choice.has_output or (choice.finish_reason and not answer.arrivals):
            answer.arrivals.append(came)


@dataclass(frozen=True)
class Measurement:
    """What a run met."""

    records: Sequence[Record]
    """One a request, in the order of sessions, their turns and the turns' requests."""
    duration: float
    """Seconds from the first request to the last answer."""
    started: float = 0.0
    """When the run began; on the records' clock."""
    aborted: str | None = None
    """Why the run ended before all was asked, if it did."""
