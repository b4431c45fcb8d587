"""Arrival times of a run's sessions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from radixkv.lab.bench.session import Session


def is_open_loop(request_rate: float | None, sessions: Sequence[Session]) -> bool:
    """Returns whether sessions start at given times, whether or not the server has answered earlier ones.

    Args:
        request_rate: as in ``Load``.
        sessions: the sessions of the run.
    """
    if request_rate is None:
        return bool(sessions) and all(session.arrival_s is not None for session in sessions)
    return math.isfinite(request_rate)


@dataclass(frozen=True)
class Load:
    """How sessions are sent.

    In a closed loop, ``max_concurrency`` clients send one session after another. In an open loop, sessions start at
    given times, whether or not the server has answered earlier ones.
    """

    model: str
    max_concurrency: int | None = None
    """Maximum number of requests in flight; in a closed loop also of sessions. None: no limit."""
    request_rate: float | None = None
    """Mean number of sessions that start in a second, as a Poisson process.

    Infinity: a closed loop. None: the sessions' own arrival times, or a closed loop if they have none.
    """
    speed: float = 1.0
    """Factor by which the sessions' own arrival times are sped up."""
    seed: int = 0
    """Seed of the Poisson process."""
    has_extensions: bool = True
    """Whether requests have ``ignore_eos`` and ``return_token_ids``, which are no fields of OpenAI's API."""

    def arrivals(self, sessions: Sequence[Session]) -> list[float] | None:
        """Returns each session's start in seconds after the start of the run; None: a closed loop."""
        if not is_open_loop(self.request_rate, sessions):
            return None
        if self.request_rate is not None:
            return list(_poisson(self.request_rate, len(sessions), self.seed))
        return [session.arrival_s / self.speed for session in sessions if session.arrival_s is not None]


def _poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    arrival_s = 0.0
    for _ in range(count):
        yield arrival_s
        arrival_s += rng.expovariate(rate)
