"""How long copies wait beside steps, on a clock of the test's."""

from __future__ import annotations

import random

import pytest

from radixkv.runtime.device.memory.cuda.copy_pace import BURST_S, MAX_BYTES_PER_S_BESIDE_STEPS, CopyPace

PART_BYTES = 16 << 20


class Clock:
    """A clock that a pace's sleep advances, and more than asked if ``lateness_s`` is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lateness_s = 0.0
        self.is_stepping = True
        self.pace = CopyPace(lambda: self.is_stepping, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.lateness_s

    def seconds_for(self, n_parts: int) -> float:
        begun = self.now
        for _ in range(n_parts):
            self.pace.wait(PART_BYTES)
        return self.now - begun


@pytest.mark.parametrize("lateness_s", [0.0, 0.0001, 0.9 * BURST_S])
def test_copies_beside_steps_reach_the_rate_and_no_more(lateness_s: float) -> None:
    clock = Clock()
    clock.lateness_s = lateness_s
    n_parts = 1000
    seconds = n_parts * PART_BYTES / MAX_BYTES_PER_S_BESIDE_STEPS
    assert seconds - 2 * BURST_S <= clock.seconds_for(n_parts) <= seconds + BURST_S


def test_a_pause_is_caught_up_for_a_moment_only() -> None:
    clock, rng = Clock(), random.Random(1)
    for _ in range(100):
        clock.now += rng.uniform(0, 1)
        n_parts = rng.randint(1, 50)
        seconds = (n_parts - 1) * PART_BYTES / MAX_BYTES_PER_S_BESIDE_STEPS
        assert clock.seconds_for(n_parts) >= seconds - 1.001 * BURST_S


def test_nothing_waits_without_a_step() -> None:
    clock = Clock()
    clock.is_stepping = False
    assert clock.seconds_for(1000) == 0.0
