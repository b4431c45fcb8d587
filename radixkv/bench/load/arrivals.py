"""When the sessions of a run begin."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from radixkv.bench.session import Session


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
        if self.request_rate is None:
            own = [session.arrival_s for session in sessions if session.arrival_s is not None]
            return [at / self.speed for at in own] if own and len(own) == len(sessions) else None
        return list(self._poisson(len(sessions))) if math.isfinite(self.request_rate) else None

    def _poisson(self, count: int) -> Iterator[float]:
        assert self.request_rate is not None
        rng = random.Random(self.seed)
        at = 0.0
        for _ in range(count):
            yield at
            at += rng.expovariate(self.request_rate)
