"""Waiting requests age: no priority makes others wait for ever."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.settings.checks import MIN_PRIORITY
from support.engine import Engine, prompt


def flood(engine: Engine, victim: Request, n_requests: int) -> int:
    """Keeps eight urgent requests waiting until the victim has ended; returns how many of them have ended."""
    urgent: list[Request] = []
    for number in range(n_requests):
        urgent.append(engine.add([number % 90, *prompt(12)], max_tokens=4, priority=MIN_PRIORITY))
        while len(engine.scheduler.waiting) > 8:
            engine.turn()
        if victim.phase is Phase.FINISHED:
            return sum(request.phase is Phase.FINISHED for request in urgent)
    raise AssertionError("the victim starves")


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_request_ends_although_others_always_have_a_better_priority(policy: str) -> None:
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=32, schedule_policy=policy, max_queued_requests=64)
    victim = engine.add(prompt(20, first=5), max_tokens=6, n=2)
    n_before = flood(engine, victim, 400)
    assert 60 <= n_before <= 140, "once in 64 admissions, and under lpm after at most 64 passes"
    engine.run_to_the_end()


def test_few_requests_start_in_the_order_of_their_priorities() -> None:
    engine = Engine(64, 4, max_num_seqs=1, max_num_batched_tokens=32)
    requests = [engine.add(prompt(8, first=i), max_tokens=1, priority=-i) for i in range(40)]
    engine.run()
    assert list(engine.ended) == [request.id for request in reversed(requests)]
