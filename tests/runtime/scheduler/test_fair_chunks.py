"""Short prompts do not wait for long ones, and long ones are not delayed by more than their fair share."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.request import Phase, Request
from support.cases import examples
from support.engine import Engine, prompt

BUDGET = 64
LONG = 400


class FairEngine(Engine):
    """An engine with a large pool that records the step in which each request is added and gets its first token."""

    def __init__(self, *, n_pages: int = 2048, budget: int = BUDGET, **options: object) -> None:
        super().__init__(n_pages, **{"max_num_seqs": 64, "max_num_batched_tokens": budget, **options})
        self.n_steps = 0
        self.added_at: dict[Request, int] = {}
        self.first_token_at: dict[Request, int] = {}
        self.max_prefilling = 0
        self.max_prefilling_tokens = 0
        """Most prompt tokens of requests that were being prefilled at once."""

    def check_invariants(self) -> None:
        self.device.free_pages = set(self.free_pages)

    def add_prompt(self, n_tokens: int, first: int, priority: int = 0) -> Request:
        request = self.add([first % 89, first // 89, *prompt(n_tokens - 2, first=first)], 2, priority=priority)
        self.added_at[request] = self.n_steps
        return request

    def step(self) -> None:
        self.launch()
        prefilling = self.scheduler.running.prefilling()
        self.max_prefilling = max(self.max_prefilling, len(prefilling))
        self.max_prefilling_tokens = max(self.max_prefilling_tokens, sum(r.n_prompt for r in prefilling))
        self.collect()
        self.n_steps += 1
        for request in self.added_at:
            if request.n_outputs:
                self.first_token_at.setdefault(request, self.n_steps)

    def run_steps(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
        self.check_outputs()
        self.check_idle()

    def n_steps_to_first_token(self, request: Request) -> int:
        return self.first_token_at[request] - self.added_at[request]


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("n_before", [0, 1, 5])
def test_a_short_prompt_is_computed_in_the_next_step_whatever_long_prompts_wait(
    policy: str, budget: int, n_before: int
) -> None:
    engine = FairEngine(schedule_policy=policy, budget=budget)
    longs = [engine.add_prompt(LONG, i) for i in range(12)]
    for _ in range(n_before):
        engine.step()
    short = engine.add_prompt(8, 100)
    engine.run_steps()
    assert engine.n_steps_to_first_token(short) == 1
    order = sorted(longs, key=engine.first_token_at.__getitem__)
    assert order == longs, "long prompts of one length go in order"
    n_tokens = 12 * LONG + 8
    assert engine.first_token_at[longs[-1]] <= ceil(n_tokens / (budget - 16)), "no step is left half empty"


def test_prompts_of_one_length_are_computed_one_after_another() -> None:
    engine = FairEngine()
    for i in range(8):
        engine.add_prompt(LONG, i)
    engine.run_steps()
    assert engine.max_prefilling == 1


def test_a_prompt_of_middle_length_gets_its_share_of_each_step() -> None:
    engine = FairEngine()
    for i in range(12):
        engine.add_prompt(LONG, i)
    engine.step()
    middle = engine.add_prompt(120, 100)
    engine.run_steps()
    assert engine.n_steps_to_first_token(middle) <= 5, "half of 64 tokens a step"


def test_a_long_prompt_goes_on_beside_short_ones_that_never_end() -> None:
    engine = FairEngine()
    long = engine.add_prompt(LONG, 0)
    for i in range(100):
        engine.add_prompt(30, 1 + i)
        engine.add_prompt(30, 201 + i)
        engine.step()
    assert engine.n_steps_to_first_token(long) <= ceil(LONG / (BUDGET / 2 - 4)) + 1
    engine.run_steps()


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_long_prompt_gets_its_page_of_a_small_budget_beside_short_ones_that_never_end(n_before: int) -> None:
    engine = FairEngine(max_num_seqs=3, budget=6)
    long = engine.add_prompt(40, 0)
    for _ in range(n_before):
        engine.step()
    for i in range(40):
        engine.add_prompt(2, 1 + i)
        engine.step()
    assert long in engine.first_token_at
    engine.run_steps()


def test_a_short_prompt_is_found_behind_more_long_ones_than_the_window_holds() -> None:
    engine = FairEngine(lpm_window=2)
    for i in range(6):
        engine.add_prompt(LONG, i)
    engine.step()
    short = engine.add_prompt(8, 100)
    engine.run_steps()
    assert engine.n_steps_to_first_token(short) == 1


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_long_prompt_that_is_cached_is_a_short_one(policy: str) -> None:
    engine = FairEngine(schedule_policy=policy)
    first = engine.add_prompt(LONG, 100)
    engine.run_steps()
    for i in range(6):
        engine.add_prompt(LONG, i)
    engine.step()
    second = engine.add_prompt(LONG + 8, 100)
    engine.run_steps()
    assert (first.cache_use.counted.n_cached, second.cache_use.counted.n_cached) == (0, LONG)
    assert engine.n_steps_to_first_token(second) == 1


def test_a_short_prompt_does_not_overtake_a_better_priority() -> None:
    engine = FairEngine()
    longs = [engine.add_prompt(LONG, i) for i in range(3)]
    engine.step()
    later = engine.add_prompt(8, 100, priority=1)
    engine.run_steps()
    assert engine.first_token_at[later] >= max(engine.first_token_at[long] for long in longs)


def test_short_prompts_share_what_a_long_one_has_committed_and_the_other_way_round() -> None:
    engine = FairEngine()
    long = engine.add_prompt(LONG, 0)
    engine.step()
    engine.serve([*prompt_of(long)[:100], 1], 2)  # longer than what the long one has committed so far
    n_computed = engine.n_computed
    assert n_computed == LONG + 1 + 2, "no token of a common prefix is computed twice"
    engine.check_outputs()


def test_a_long_prompt_takes_the_prefix_that_an_overtaking_one_computes_in_the_same_step() -> None:
    engine = FairEngine(schedule_policy="fcfs")
    common = prompt(20)
    engine.add(common + prompt(LONG, first=2), 2)
    engine.add([*common, 1], 2)
    assert [row.start for row in engine.launch().rows] == [0, 20]
    engine.run_to_the_end()


def test_requests_with_one_prompt_may_overtake_each_other_in_a_step() -> None:
    engine = FairEngine(n_pages=16, budget=16)
    engine.device.nan_slots.add(1)
    engine.add(range(1, 17), 1)
    engine.add([1], 1, n=2)
    engine.add(range(1, 17), 1)
    engine.run_to_the_end()


def prompt_of(request: Request) -> list[int]:
    return list(memoryview(bytes(request.known_key)).cast("i"))[: request.n_prompt]


@examples(60)
@given(
    lengths=st.lists(st.sampled_from((4, 16, 60, 150, 400, 1000)), min_size=1, max_size=14),
    arrivals=st.lists(st.integers(0, 12), min_size=14, max_size=14),
    policy=st.sampled_from(("lpm", "fcfs")),
)
def test_a_prompts_delay_depends_on_no_more_than_twice_its_own_length_of_each_other(
    lengths: list[int], arrivals: list[int], policy: str
) -> None:
    engine = FairEngine(schedule_policy=policy, n_pages=8192)
    due = sorted(zip(arrivals, range(len(lengths)), lengths, strict=False))
    while due or not engine.scheduler.is_idle:
        while due and due[0][0] <= engine.n_steps:
            _, index, n_tokens = due.pop(0)
            engine.add_prompt(n_tokens, index)
        if engine.scheduler.is_idle:
            engine.n_steps += 1
        else:
            engine.step()
    engine.check_outputs()
    max_at_once = 1 + log2(1000 / 4)
    assert engine.max_prefilling <= max_at_once
    assert engine.max_prefilling_tokens <= 2 * max(lengths)
    for request in engine.added_at:
        n_tokens = sum(min(other.n_prompt, 2 * request.n_prompt) for other in engine.added_at)
        share = BUDGET / 3 - engine.page_size
        assert engine.n_steps_to_first_token(request) <= 2 + n_tokens / share


def test_a_preempted_answer_that_drops_pages_leaves_others_what_its_rows_cannot_use() -> None:
    """It computes its answer again in rows of a page, so it has no use for its fair share of a step."""
    engine = Engine(400, 4)
    request = engine.add(prompt(20), 400, kv_budget=16)
    while request.n_outputs < 290:
        engine.turn()
    engine.scheduler.running.preempt(request, discards_results=False)
    while request.phase is not Phase.RUNNING:
        engine.turn()
    other = engine.add(prompt(200, 9), 8)
    n_before = request.n_scheduled
    n_turns = 0
    while not other.n_outputs:
        plan = engine.launch()
        if len(engine.pending) > 1 or plan is None:
            engine.collect()
        n_turns += 1
    assert n_turns <= ceil(200 / (BUDGET - 4)) + 2
    assert request.n_scheduled > n_before, "it goes on beside the prompt"
    engine.run_to_the_end("length")
