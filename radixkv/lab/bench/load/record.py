"""Records of requests: their answers and the arrival times of the answers' pieces."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from radixkv.client.chunks import ChunkChoice, ToolCallDelta, Usage, read_chunk, read_token_ids
from radixkv.client.errors import BadReply
from radixkv.lab.bench.session import Reply, ToolCall


@dataclass
class ChoiceRecord:
    """The answer of one choice."""

    text: str = ""
    reasoning: str = ""
    """The reasoning, if the server returns it in a field of its own."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] | None = None
    """Output token ids. None: the server does not return them."""
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each piece, in seconds after the request was sent."""
    finish_reason: str | None = None
    """The server's reason for the end. None: the choice has not ended."""

    def add_tool_call(self, delta: ToolCallDelta) -> None:
        """Adds the new part of a tool call."""
        while len(self.tool_calls) <= delta.index:
            self.tool_calls.append(ToolCall("", ""))
        call, more = self.tool_calls[delta.index], delta.function
        self.tool_calls[delta.index] = ToolCall(
            call.name + (more.name or ""), call.arguments + (more.arguments or ""), delta.id or call.id
        )


@dataclass
class Record:
    """Times, answers and errors of one request. Times are values of ``time.perf_counter`` in seconds."""

    session: int = 0
    """Index of the request's session in the run."""
    turn: int = 0
    """Index of the request's turn in its chat."""
    started: float = 0.0
    """When the request was sent. 0: it was not sent."""
    scheduled: float | None = None
    """When an open loop should have sent the request; latencies count from here. None: in a closed loop."""
    choices: list[ChoiceRecord] = field(default_factory=list)
    """The answers, by the choices' indices."""
    usage: Usage | None = None
    prompt_token_ids: array[int] | None = None
    """Token ids as int32, since a run may have millions. None: not returned by the server, or not decoded yet."""
    prompt_token_ids_json: bytes | None = None
    """The token ids of the prompt as JSON, until ``decode_prompt_token_ids``."""
    is_done: bool = False
    """Whether the stream ended in ``[DONE]``, which some servers leave out."""
    is_correct: bool | None = None
    """Whether the answers passed the request's check. None: they were not checked."""
    error: str | None = None
    """The error's text. None: the request has not failed."""
    error_kind: str | None = None
    """The class of the error. None: the request has not failed.

    ``connect``, ``disconnect``, ``timeout``, ``http_`` and the status, ``server`` (reported in the stream),
    ``stream`` (malformed or incomplete reply), ``prompt`` (it cannot be encoded), ``not_sent`` (an earlier turn
    failed, or the run ended before), ``stopped`` (the run ended while the request was in flight).
    """

    @property
    def lateness(self) -> float:
        """Seconds by which the request was sent too late."""
        return 0.0 if self.scheduled is None else self.started - self.scheduled

    @property
    def arrivals(self) -> list[float]:
        """Arrival times of the pieces of all choices, ascending, in seconds after the request was sent."""
        return sorted(itertools.chain.from_iterable(answer.arrivals for answer in self.choices))

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each choice."""
        return tuple(answer.text for answer in self.choices)

    @property
    def reply(self) -> Reply:
        """The answers as the session gets them."""
        first = self.choices[0] if self.choices else ChoiceRecord()
        return Reply(self.texts, tuple(first.tool_calls), first.reasoning)

    @property
    def token_ids(self) -> list[list[int]] | None:
        """The output token ids of each choice. None: the server does not return them."""
        ids = [answer.token_ids for answer in self.choices if answer.token_ids is not None]
        return ids if ids and len(ids) == len(self.choices) else None

    @property
    def ttft(self) -> float:
        """Seconds until the first piece of any choice."""
        return self.lateness + min(answer.arrivals[0] for answer in self.choices)

    @property
    def latency(self) -> float:
        """Seconds until the last piece of any choice."""
        return self.lateness + max(answer.arrivals[-1] for answer in self.choices)

    @property
    def itl(self) -> list[float]:
        """Seconds between consecutive pieces of the same choice."""
        return [
            later - earlier for answer in self.choices for earlier, later in itertools.pairwise(answer.arrivals)
        ]

    @property
    def has_ended(self) -> bool:
        """Whether the stream ended in ``[DONE]``, or every choice has a finish reason."""
        return self.is_done or (
            bool(self.choices) and all(answer.finish_reason is not None for answer in self.choices)
        )

    @property
    def n_prompt_tokens(self) -> int:
        return (self.usage and self.usage.prompt_tokens) or 0

    @property
    def n_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return (self.usage and self.usage.completion_tokens) or 0

    @property
    def n_cached_tokens(self) -> int | None:
        """Prompt tokens that came from the cache. None: the server does not report them."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token of a choice after the first. None: the choices have one token each."""
        n_later_tokens = self.n_output_tokens / max(len(self.choices), 1) - 1
        return (self.latency - self.ttft) / n_later_tokens if n_later_tokens > 0 else None

    def add_event(self, data: bytes, arrival: float) -> None:
        """Adds an event of the stream.

        Args:
            data: the event's data.
            arrival: arrival time in seconds after the request was sent.

        Raises:
            BadReply: the event reports an error, or is no completion chunk.
        """
        if self.is_done:
            return
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = read_chunk(data)
        self.usage = chunk.usage or self.usage
        self._add_prompt(chunk.prompt_token_ids)
        for choice in chunk.choices:
            self._add_choice(choice, arrival)

    def check_complete(self, n_choices: int) -> None:
        """Checks that nothing is missing when the stream has ended.

        Args:
            n_choices: number of choices that were requested.

        Raises:
            BadReply: output, choices, the end or the usage is missing.
        """
        if not self.has_ended:
            raise BadReply("stream", "the stream ended early, without a finish_reason and without [DONE]")
        if not self.choices or not all(answer.arrivals for answer in self.choices):
            raise BadReply("stream", "the stream brought no output")
        if len(self.choices) != n_choices:
            raise BadReply("stream", f"the stream brought {len(self.choices)} of {n_choices} choices (n)")
        if self.usage is None or self.usage.prompt_tokens is None:
            raise BadReply(
                "stream", "the stream brought no usage; the server must support stream_options.include_usage"
            )

    def decode_prompt_token_ids(self) -> None:
        """Decodes the prompt's token ids; called after the run, to save time while requests are in flight.

        Raises:
            BadReply: the server's ``prompt_token_ids`` are no token ids.
        """
        text, self.prompt_token_ids_json = self.prompt_token_ids_json, None
        if text is not None:
            self.prompt_token_ids = read_token_ids(text)

    def _add_prompt(self, ids: msgspec.Raw) -> None:
        text = bytes(ids)  # a copy, since the Raw would keep the whole event in memory
        if text not in (b"null", b"[]"):
            self.prompt_token_ids_json = text

    def _add_choice(self, chunk: ChunkChoice, arrival: float) -> None:
        while len(self.choices) <= chunk.index:
            self.choices.append(ChoiceRecord())
        choice = self.choices[chunk.index]
        self._add_prompt(chunk.prompt_token_ids)
        if chunk.token_ids is not None:
            choice.token_ids = choice.token_ids or []
            choice.token_ids += chunk.token_ids
        choice.text += chunk.content
        choice.reasoning += chunk.reasoning
        for delta in chunk.tool_calls:
            choice.add_tool_call(delta)
        choice.finish_reason = chunk.finish_reason or choice.finish_reason
        # An event that has only a finish_reason is no token; it counts when the choice has no other event.
        if chunk.has_output or (chunk.finish_reason and not choice.arrivals):
            choice.arrivals.append(arrival)


@dataclass(frozen=True)
class Measurement:
    """The records of a run."""

    records: Sequence[Record]
    """One record for each request, in the order of sessions, their turns and the turns' requests."""
    duration: float
    """Seconds from the first request to the last answer."""
    started: float = 0.0
    """Start of the run, as a value of ``time.perf_counter``."""
    aborted: str | None = None
    """Why the run ended early. None: it did not."""
