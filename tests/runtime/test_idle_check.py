"""When an idle runtime looks at every invariant: after work, and only so often that requests hardly ever wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest
import zmq

from radixkv.runtime import process as main
from radixkv.runtime.loop import Loop
from radixkv.wire import FromRuntime

END_S = 100.0


@dataclass
class Clients:
    """Socket, loop and clock at once: requests come at given times, and all there is to wait for is time."""

    check_s: float
    """What a check takes."""
    arrivals: list[float]
    """When requests come; each takes one turn, of no time."""
    now: float = 0.0
    has_work: bool = False
    checks: list[float] = field(default_factory=list)
    """When the runtime looked."""

    def monotonic(self) -> float:
        return self.now

    def poll(self, wait_ms: int) -> int:
        until = self.now + wait_ms / 1000
        self.has_work = bool(self.arrivals) and self.arrivals[0] <= until
        self.now = max(self.now, self.arrivals.pop(0)) if self.has_work else until
        self.server._is_draining = self.now >= END_S
        return 0

    def turn(self) -> list[FromRuntime]:
        self.has_work = False
        return []

    def check(self) -> None:
        self.checks.append(self.now)
        self.now += self.check_s

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(main, "time", self)
        self.server = main.Server(cast(zmq.Socket[bytes], self), cast(Loop, self))
        self.server.run()


def test_after_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(check_s=0.001, arrivals=[10.0, 20.0, 20.1, 60.0])
    clients.run(monkeypatch)
    assert [int(at) for at in clients.checks] == [10, 20, 60]


def test_however_long_it_takes_a_two_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million pages take half a second in long nodes and ten in nodes of one page each, and a client that asks
    every second would wait for it every time."""
    clients = Clients(check_s=0.2, arrivals=[float(at) for at in range(1, 100)])
    clients.run(monkeypatch)
    assert len(clients.checks) == 3
    assert all(40.0 <= after - before < 42.0 for before, after in pairwise(clients.checks))


def test_what_was_put_off_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(check_s=0.2, arrivals=[1.0, 5.0])
    clients.run(monkeypatch)
    assert len(clients.checks) == 2
    assert 41.0 < clients.checks[1] < 43.0
