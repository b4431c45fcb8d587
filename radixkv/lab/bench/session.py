"""Requests of a benchmark, grouped into sessions whose turns may depend on earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A chat message in OpenAI's format."""

Prompt = str | tuple[int, ...] | list[Message]
"""A text or token ids for ``/v1/completions``, or messages for ``/v1/chat/completions``."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """The arguments as JSON text."""
    id: str = ""
    """The server's name of the call, which the tool's result refers to."""

    @property
    def message_part(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls`` of an assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class BenchRequest:
    """One generation request."""

    prompt: Prompt
    output_len: int
    """Tokens to generate for each choice; without ``ignore_eos`` their maximum."""
    n: int = 1
    """Number of choices."""
    temperature: float = 0.0
    seed: int | None = None
    check: Callable[[Reply], bool | None] | None = None
    """Returns whether the reply is correct, or None if it is not to be judged. None: no reply is judged."""
    ignore_eos: bool = True
    """Whether answers go on after the end-of-sequence token."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the model may call, in OpenAI's format; only for chats."""
    after_s: float = 0.0
    """How long after the answers to the previous turn it is sent, in seconds: so long its tools take."""


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    texts: tuple[str, ...]
    """The text of each choice."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of the first choice."""
    reasoning: str = ""
    """The reasoning of the first choice, if the server returns it in a field of its own."""

    @property
    def message(self) -> Message:
        """The first choice as the assistant's message in the next prompt of the chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.texts[0]}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message_part for call in self.tool_calls]
        return message


Turns = Generator[Sequence[BenchRequest], Sequence[Reply], None]
"""Yields the requests of a turn, which are sent together, and receives their replies in the same order.

The generator is closed early when a request of the turn fails.
"""


@dataclass(frozen=True)
class Session:
    """The requests of one client, turn after turn."""

    turns: Callable[[], Turns]
    """Returns a fresh generator at each call, so that the same session can be sent to several servers."""
    n_requests: int
    """Number of requests in all turns. If it depends on the answers: the number for correct answers."""
    first_turn: int = 0
    """Index of the first turn in its chat; above 0 if other sessions have the chat's earlier turns."""
    arrival_s: float | None = None
    """Arrival time from the data set, in seconds after the start of the run; None: the data set has no times."""


def single_request_session(request: BenchRequest, arrival_s: float | None = None, *, turn: int = 0) -> Session:
    """Returns a session that sends one request, the turn of this index in its chat."""

    def turns() -> Turns:
        yield (request,)

    return Session(turns, n_requests=1, first_turn=turn, arrival_s=arrival_s)
