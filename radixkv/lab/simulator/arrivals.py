"""When the requests of a replay in virtual time arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Protocol

from radixkv.lab.bench.workloads.tool_pauses import tool_seconds
from radixkv.lab.simulator.turns import Turn

USER_SIGMA = 0.8
"""Of the logarithm of the time that a user takes, which is log-normal."""
_SEED = 0

Arrival = tuple[float, int]
"""Seconds since the start, and the index of a request."""


class Arrivals(Protocol):
    """When requests arrive. The next turn of a conversation is not known before its answer has ended."""

    def first(self) -> Sequence[Arrival]:
        """Returns the arrivals of the requests with which conversations begin."""
        ...

    def after(self, index: int, now: float) -> Sequence[Arrival]:
        """Returns the arrivals of the requests that go on from one whose answer has ended. O(1)."""
        ...


class RecordedArrivals:
    """Requests arrive at their recorded times; none comes before the answer that it goes on from.

    Args:
        turns: the turn before each request.
        times_s: when each request arrived.
        speed: how many times as fast it is replayed.
    """

    def __init__(self, turns: Sequence[Turn | None], times_s: Sequence[float], speed: float) -> None:
        self._times = [(time_s - times_s[0]) / speed for time_s in times_s]
        self._next = next_turns(turns)
        self._first = [index for index, turn in enumerate(turns) if turn is None]

    def first(self) -> Sequence[Arrival]:
        """See ``Arrivals``."""
        return [(self._times[index], index) for index in self._first]

    def after(self, index: int, now: float) -> Sequence[Arrival]:
        """See ``Arrivals``."""
        return [(max(now, self._times[one]), one) for one in self._next[index]]


class SyntheticArrivals:
    """Conversations begin as a Poisson process, and go on after random pauses, which are equal in all replays.

    A tool's name decides how its times are distributed, as in the workload ``tool-pauses``; those of a user are
    log-normal.

    Args:
        turns: the turn before each request.
        calls: names of the tools that each request's answer calls; none: a user goes on.
        request_rate: conversations that begin a second.
        tool_median_s: median time of all tools.
        user_median_s: median time of users.
    """

    def __init__(
        self,
        turns: Sequence[Turn | None],
        calls: Sequence[Sequence[str]],
        *,
        request_rate: float,
        tool_median_s: float,
        user_median_s: float,
    ) -> None:
        rng = Random(_SEED)
        self._next = next_turns(turns)
        first = [index for index, turn in enumerate(turns) if turn is None]
        times = accumulate(rng.expovariate(request_rate) for _ in first)
        self._first = list(zip(times, first, strict=True))
        self._pauses = [
            max(tool_seconds(name, tool_median_s, rng) for name in names)
            if names
            else user_median_s * rng.lognormvariate(0.0, USER_SIGMA)
            for names in calls
        ]

    def first(self) -> Sequence[Arrival]:
        """See ``Arrivals``."""
        return self._first

    def after(self, index: int, now: float) -> Sequence[Arrival]:
        """See ``Arrivals``."""
        return [(now + self._pauses[index], one) for one in self._next[index]]


def next_turns(turns: Sequence[Turn | None]) -> dict[int, list[int]]:
    """Returns the requests that go on from each request. O(requests)."""
    after: dict[int, list[int]] = defaultdict(list)
    for index, turn in enumerate(turns):
        if turn is not None:
            after[turn.before].append(index)
    return after
