"""Preemptions: which tokens count as computed again, and how many pages an admission leaves free against them."""

from __future__ import annotations

from collections import deque
from itertools import product
from random import Random
from typing import NamedTuple

import pytest

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.engine import Engine, prompt, token_bytes
from support.scheduler import make_scheduler


@pytest.mark.parametrize(("n_slots", "seed"), rest_nightly(product([0, 24], range(4)), kept=(5,)))
def test_tokens_computed_again_are_counted(n_slots: int, seed: int) -> None:
    """They are what a row has before the end of an earlier row of its request: the KV that the request had. What it
    finds in a tier again is in no row."""
    random = Random(seed)
    engine = Engine(24, 4, n_slots=n_slots, max_num_seqs=6, max_num_batched_tokens=24)
    ends: dict[Request, int] = {}
    n_again = 0
    texts = [prompt(30, first) for first in range(3)]
    for _ in range(30):
        text = random.choice(texts)[: random.randint(1, 30)] + prompt(random.randint(1, 8), random.randrange(50))
        engine.add(text, random.randint(1, 40), n=random.choice((1, 1, 2)), priority=random.randrange(2))
    steps: set[int] = set()
    while not engine.scheduler.is_idle:
        engine.turn()
        for plan, _ in engine.pending:
            for row in () if plan.step in steps else plan.rows:
                request, end = engine.rows[plan.step, row.batch_slot], row.start + row.n_tokens
                n_again += max(0, min(ends.get(request, 0), end) - row.start)
                ends[request] = max(ends.get(request, 0), end)
            steps.add(plan.step)
    engine.check_outputs()
    assert engine.scheduler.n_preemptions > 0
    assert n_again > 0, "the case is too easy"
    assert engine.scheduler.n_recomputed_tokens == n_again


class Run(NamedTuple):
    """What became of a storm."""

    recomputed: float
    """Share of all computed tokens that were computed again."""
    end_s: float
    pause_s: float
    """The longest pause in an answer that one answer in ten exceeds."""


def storm(**settings: float) -> Run:
    """Answers of about 1,000 tokens arrive as fast as a device of 65,536 tokens serves them, in simulated time."""
    random, now = Random(1), 0.0
    cache = PageCache(4096, 16)
    scheduler = make_scheduler(
        cache,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        clock=lambda: now,
        **settings,  # type: ignore[arg-type]
    )
    n_requests, rate, n_computed = 160, 7, 0
    arrivals = deque(sorted(random.uniform(0, n_requests / rate) for _ in range(n_requests)))
    pending: deque[StepPlan] = deque()
    last: dict[Request, float] = {}
    pauses: dict[Request, float] = {}
    while arrivals or pending or not scheduler.is_idle:
        while arrivals and arrivals[0] <= now:
            n_prompt = random.randint(250, 750)
            request = Request(
                id=str(len(arrivals)),
                namespace=Namespace(),
                known_key=bytearray(token_bytes([random.randrange(3000) for _ in range(n_prompt)])),
                n_prompt=n_prompt,
                max_tokens=random.randint(500, 1500),
                received_at=arrivals.popleft(),
            )
            scheduler.add(request)
        plan = scheduler.schedule()
        if plan is not None:
            pending.append(plan)
            n_computed += plan.n_tokens
            now += 8e-3 + 2e-5 * plan.n_tokens
        elif not pending:
            now = arrivals[0]
        if pending and (len(pending) > 1 or plan is None):
            done = pending.popleft()
            tokens = tuple(random.randrange(3000) for _ in done.rows)
            for update in scheduler.complete(done, StepResult(tokens, (True,) * len(tokens))):
                pause = now - last.get(update.request, now)
                pauses[update.request] = max(pauses.get(update.request, 0.0), pause)
                last[update.request] = now
    scheduler.check()
    ordered = sorted(pauses.values())
    return Run(scheduler.n_recomputed_tokens / n_computed, now, ordered[len(ordered) * 9 // 10])


@pytest.mark.nightly
def test_the_default_reserve_ends_storms_of_preemptions_at_equal_throughput() -> None:
    few = storm(num_reserved_decode_tokens=16, max_reserved_decode_share=1 / 24)
    default = storm()
    assert few.recomputed > 0.05
    assert default.recomputed < few.recomputed / 4
    assert default.pause_s < few.pause_s / 4
    assert default.end_s < 1.02 * few.end_s
