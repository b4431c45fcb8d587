"""When an idle runtime checks every invariant: after work, and rarely enough that requests hardly ever wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest
import zmq

from radixkv.runtime import process
from radixkv.runtime.loop import Loop
from radixkv.wire.messages import FromRuntime

END_S = 100.0


class TimeIsUp(Exception):
    """Ends a runtime at ``END_S``."""


@dataclass
class FakeWorld:
    """Fake socket, loop and clock: requests arrive at given times, and waiting advances the clock."""

    check_s: float
    """Duration of a check."""
    arrivals: list[float]
    """Times at which requests arrive; each takes one turn without duration."""
    now: float = 0.0
    has_work: bool = False
    checks: list[float] = field(default_factory=list)
    """Times of the checks."""
    is_waiting: bool = False
    descriptors: tuple[int, ...] = ()

    def advance(self) -> None:
        """Nothing: there is no other tier."""

    def monotonic(self) -> float:
        return self.now

    def poll(self, wait_ms: int) -> int:
        until = self.now + wait_ms / 1000
        self.has_work = bool(self.arrivals) and self.arrivals[0] <= until
        self.now = max(self.now, self.arrivals.pop(0)) if self.has_work else until
        if self.now >= END_S:
            raise TimeIsUp
        return 0

    def turn(self) -> list[FromRuntime]:
        self.has_work = False
        return []

    def check(self) -> None:
        self.checks.append(self.now)
        self.now += self.check_s

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "time", self)
        with pytest.raises(TimeIsUp):
            process.RuntimeServer(cast(zmq.Socket[bytes], self), cast(Loop, self)).run()


def test_one_check_after_each_period_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeWorld(check_s=0.001, arrivals=[10.0, 20.0, 20.1, 60.0])
    world.run(monkeypatch)
    assert [int(at) for at in world.checks] == [10, 20, 60]


def test_checks_take_at_most_a_two_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking a million pages takes half a second in long nodes and ten seconds in nodes of one page. A client
    that sends a request every second would otherwise wait for a check every time."""
    world = FakeWorld(check_s=0.2, arrivals=[float(at) for at in range(1, 100)])
    world.run(monkeypatch)
    assert len(world.checks) == 3
    assert all(40.0 <= after - before < 42.0 for before, after in pairwise(world.checks))


def test_a_postponed_check_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeWorld(check_s=0.2, arrivals=[1.0, 5.0])
    world.run(monkeypatch)
    assert len(world.checks) == 2
    assert 41.0 < world.checks[1] < 43.0
