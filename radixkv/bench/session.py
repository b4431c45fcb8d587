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
class BenchRequest:
    """One generation request."""

    prompt: Prompt
    output_len: int
    """Tokens to generate for each choice; the end-of-sequence token is ignored."""
    n: int = 1
    """Number of choices."""
    temperature: float = 0.0
    seed: int | None = None
    check: Callable[[Sequence[str]], bool] | None = None
    """Returns whether the choices' texts give the correct answer; None: the answer is not checked."""


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    texts: tuple[str, ...]
    """The text of each choice."""


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
    """Number of requests in all turns."""
    first_turn: int = 0
    """Index of the first turn in its chat; above 0 if other sessions have the chat's earlier turns."""
    arrival_s: float | None = None
    """Arrival time from the data set, in seconds after the start of the run; None: the data set has no times."""


def single_request_session(request: BenchRequest, arrival_s: float | None = None, *, turn: int = 0) -> Session:
    """Returns a session that sends one request, the turn of this index in its chat."""

    def turns() -> Turns:
        yield (request,)

    return Session(turns, n_requests=1, first_turn=turn, arrival_s=arrival_s)
