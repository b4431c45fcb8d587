"""Pools of a few pages, and prompts and outputs that end at the edge of a page, a chunk or the pool: every output
is correct, every request finishes, and no page leaks."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from radixkv.runtime.request import GREEDY, Phase
from radixkv.settings.config import CacheConfig, EngineConfig, SchedulePolicy, SchedulerConfig
from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.engine import Engine, name_of, prompt
from support.fake_device import expected_output

MAX_TOKENS = 160


class RandomClients:
    """A small engine and random actions on it: requests up to the size of the pool, aborts and flushes."""

    def __init__(self, random: Random, page_size: int) -> None:
        n_pages, n_rows = random.choice((1, 2, 3, 5, 8)), random.choice((1, 2, 4))
        self.budget = n_rows - 1 + page_size + random.choice((0, 1, page_size))
        limits = SchedulerConfig(max_num_seqs=n_rows, max_num_batched_tokens=self.budget)
        EngineConfig(cache=CacheConfig(page_size=page_size), scheduler=limits)  # raises if the settings are invalid
        self.engine = Engine(
            n_pages,
            page_size,
            max_num_seqs=n_rows,
            max_num_batched_tokens=self.budget,
            schedule_policy=random.choice(("lpm", "fcfs")),
            lpm_window=random.choice((1, 3, 256)),
            lpm_max_passes=random.choice((1, 64)),
        )
        self.room = min(n_pages * page_size + 1, MAX_TOKENS)
        """Maximum of prompt and output: the last token's KV is never computed."""
        self.random = random
        self.text = [random.randrange(1, 4) for _ in range(MAX_TOKENS)]

    def submit(self) -> None:
        random, page_size = self.random, self.engine.page_size
        edge = random.choice((page_size, 2 * page_size, self.budget, self.room, self.room // 2))
        n_prompt = min(max(1, edge + random.choice((-1, 0, 1))), self.room - 1)
        n_common = random.randrange(n_prompt + 1)
        max_output = self.room - n_prompt
        self.engine.add(
            self.text[:n_common] + [random.randrange(1, 4) for _ in range(n_prompt - n_common)],
            min(max_output, random.choice((1, 2, page_size, page_size + 1, max_output))),
            n=random.choice((1, 1, 3)),
            priority=random.choice((0, 0, 1)),
            reads_cache=random.random() < 0.9,
        )

    def abort_one(self) -> None:
        live = [request for name, request in self.engine.requests.items() if name not in self.engine.ended]
        if live:
            self.engine.abort(self.random.choice(live))

    def flush(self) -> None:
        self.engine.cache.flush()
        self.engine.check_invariants()


@pytest.mark.parametrize("n_seeds", rest_nightly([6, 24], kept=(0,)))
@pytest.mark.parametrize("page_size", rest_nightly([1, 3, 16, 64], kept=(0, 1)))
def test_requests_as_large_as_the_pool_share_it_and_finish(page_size: int, n_seeds: int) -> None:
    n_preemptions = n_cached = 0
    for seed in range(n_seeds):
        random = Random(seed)
        clients = RandomClients(random, page_size)
        engine = clients.engine
        for _ in range(60):
            random.choices((clients.submit, engine.turn, clients.abort_one, clients.flush), (15, 80, 4, 1))[0]()
        live = [request for request in engine.requests.values() if name_of(request) not in engine.ended]
        engine.run(n_turns=40 + 4 * sum(request.n_prompt // page_size + request.max_tokens for request in live))
        engine.check_outputs()
        engine.check_idle()
        n_preemptions += engine.scheduler.n_preemptions
        uses = (request.cache_use.counted for request in engine.requests.values())
        n_cached += sum(use.n_cached for use in uses if use is not None)
    assert n_preemptions > 0, "no request was preempted"
    assert n_cached > 0


@pytest.mark.nightly
@pytest.mark.parametrize("shares", rest_nightly([True, False], kept=(0,)))
def test_unknown_output_lengths_cost_few_steps(shares: bool) -> None:
    """Without ``max_tokens`` each request may fill the pool. A preempted request does not wait for that much room,
    and the requests do not preempt each other over and over."""
    n_steps = []
    for length_is_known in (True, False):
        engine = Engine(60, 4, max_num_seqs=16, max_num_batched_tokens=64, shares=shares)
        min_computed = 0
        for i in range(40):
            text, stop = prompt(9, first=i), range(100, 1000, 48)
            n_tokens = len(expected_output(Namespace(), text, 200, stop))
            engine.add(text, max_tokens=n_tokens if length_is_known else 200, stop=stop)
            min_computed += len(text) + n_tokens - 1
        engine.run_to_the_end()
        assert engine.scheduler.n_preemptions > 0, "no request was preempted"
        assert engine.n_computed < 2 * min_computed
        n_steps.append(len(engine.device.executed))
    assert n_steps[1] <= 1.2 * n_steps[0]


@pytest.mark.parametrize("policy", rest_nightly(["fcfs", "lpm"], kept=(0,)))
def test_a_chunked_prompt_finishes_beside_a_stream_of_younger_requests_that_hit(policy: SchedulePolicy) -> None:
    """Younger requests do not get the pages that it still needs."""
    page_size = 4
    engine = Engine(192, page_size, max_num_batched_tokens=261, schedule_policy=policy, lpm_max_passes=2)
    document = prompt(77 * page_size, first=5)
    engine.serve(document, max_tokens=1)
    oldest = engine.add([3, *prompt(127 * page_size - 2, first=91)], max_tokens=4)
    for turn in range(150):
        while len(engine.scheduler.waiting) < 3:
            engine.add([*document, 100 + turn], max_tokens=30)
        engine.turn()
        if name_of(oldest) in engine.ended:
            break
    assert name_of(oldest) in engine.ended
    assert engine.scheduler.n_preemptions == 0
    engine.run_to_the_end()


def test_no_pages_are_reserved_for_a_prompt_preempted_between_two_chunks() -> None:
    engine = Engine(8, 4, max_num_seqs=3, max_num_batched_tokens=5)
    engine.add(prompt(3, first=1), max_tokens=9)
    engine.add(prompt(21, first=2), max_tokens=7)
    while not engine.scheduler.is_idle:
        engine.step()
    assert engine.scheduler.n_preemptions == 1
    engine.check_outputs()
    engine.check_idle()


def test_no_pages_are_reserved_for_a_preempted_prompt_when_a_younger_request_is_tried_first() -> None:
    """Its pages become free in the same plan, and ``lpm`` tries the younger request first: its cached prefix is
    longer."""
    engine = Engine(
        22,
        4,
        max_num_seqs=3,
        max_num_batched_tokens=6,
        schedule_policy="lpm",
        num_reserved_decode_tokens=16,
        max_reserved_decode_share=1 / 24,
    )
    document = prompt(40, first=1)
    engine.add(document, max_tokens=40)
    while not engine.requests["r0"].n_outputs:
        engine.step()
    older = engine.add(prompt(40, first=2), max_tokens=4)
    engine.step()
    younger = engine.add([*document, 100], max_tokens=2)
    while not engine.scheduler.n_preemptions:
        assert younger.first_row is None, "the older prompt still needs the free pages"
        engine.step()
    assert older.phase is Phase.WAITING
    assert younger.first_row is not None
    engine.run_to_the_end()


def test_forks_leave_an_older_prompt_the_pages_it_still_needs() -> None:
    """The leader's prompt is cached, so it gets its first token while the older prompt is still in chunks."""
    engine = Engine(80, 4, max_num_seqs=16, max_num_batched_tokens=35)
    document = prompt(40, first=9)
    engine.serve(document, max_tokens=1)
    older = engine.add([3, *prompt(255, first=77)], max_tokens=4)
    engine.turn()
    leader = engine.add([*document, 100, 101], max_tokens=8, n=8, sampling=replace(GREEDY, temperature=1.0))
    while not older.n_outputs:
        engine.turn()
    assert leader.n_outputs > 0
    engine.run_to_the_end()
    assert engine.scheduler.n_preemptions == 0


def test_a_request_with_precedence_is_admitted_into_pages_that_a_later_prompt_still_needs() -> None:
    engine = Engine(256, 4, max_num_seqs=8, max_num_batched_tokens=66, schedule_policy="fcfs")
    document = prompt(160, first=5)
    engine.serve(document, max_tokens=1)
    engine.add([3, *prompt(859, first=77)], max_tokens=40, priority=5)
    engine.turn(3)
    urgent = engine.add([*document, 100], max_tokens=4, priority=0)
    engine.turn(4)
    assert urgent.n_outputs > 0
    engine.run_to_the_end()
