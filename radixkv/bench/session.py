"""What a client asks in a run: requests, in sessions whose next turn may need the answers to the one before."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""OpenAI's, of a chat."""

Prompt = str | tuple[int, ...] | list[Message]
"""A text or token ids, for ``/v1/completions``; messages, for ``/v1/chat/completions``."""


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: Prompt
    output_len: int
    """Tokens of each choice; the end-of-sequence token is ignored."""
    n: int = 1
    """Choices."""
    temperature: float = 0.0
    seed: int | None = None
    is_right: Callable[[Sequence[str]], bool] | None = None
    """Whether the choices' texts give the right answer; None: there is none to compare with."""


@dataclass(frozen=True)
class Reply:
    """What a request was answered: the text of each choice."""

    texts: tuple[str, ...]


Turns = Generator[Sequence[Request], Sequence[Reply], None]
"""Yields the requests of a turn, which are sent together, and is sent their replies, in the same order.

It is closed early when a request of the turn fails.
"""


@dataclass(frozen=True)
class Session:
    """What one client asks, turn after turn."""

    turns: Callable[[], Turns]
    """Begins anew each time, so that several servers can be asked the same."""
    n_requests: int
    """Of all turns together."""
    arrival_s: float | None = None
    """When it begins, in seconds after the run does, by its data set's own clock; None: there is no clock."""


def lone(request: Request, arrival_s: float | None = None) -> Session:
    """A session of one request."""

    def turns() -> Turns:
        yield (request,)

    return Session(turns, n_requests=1, arrival_s=arrival_s)
