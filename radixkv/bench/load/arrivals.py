"""When the sessions of a run begin."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from radixkv.bench.session import Session


def is_open_loop(request_rate: float | None, sessions: Sequence[Session]) -> bool:
    """Whether these sessions, at this rate as in ``Load``, begin no matter how far the server has come."""
    if request_rate is None:
        return bool(sessions) and all(session.arrival_s is not None for session in sessions)
    return math.isfinite(request_rate)


@dataclass(frozen=True)
class Load:
    """How sessions are sent.

    In a closed loop there are so many clients, each of which asks one session after another. In an open loop
    sessions begin when they begin, no matter how far the server has come.
    """

    model: str
    max_concurrency: int | None = None
    """Most requests in flight; in a closed loop also most sessions. None: as many as there are."""
    request_rate: float | None = None
    """Sessions that begin in a second on average, as a Poisson process; infinite: a closed loop. None: the sessions
    begin by their own clock, and without one in a closed loop."""
    speed: float = 1.0
    """How much faster than that clock."""
    seed: int = 0
    """Of the Poisson process."""
    has_extensions: bool = True
    """Whether requests have fields that are not OpenAI's: ``ignore_eos`` and ``return_token_ids``."""

    def arrivals(self, sessions: Sequence[Session]) -> list[float] | None:
        """When each begins, in seconds after the run does; None: a closed loop."""
        if not is_open_loop(self.request_rate, sessions):
            return None
        if self.request_rate is not None:
            return list(_poisson(self.request_rate, len(sessions), self.seed))
        return [session.arrival_s / self.speed for session in sessions if session.arrival_s is not None]


def _poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    at = 0.0
    for _ in range(count):
        yield at
        at += rng.expovariate(rate)
