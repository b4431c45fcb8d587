"""How the scheduler recovers from failed steps and from non-finite rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import SampledStep
from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.engine import Engine, name_of, prompt


def test_pages_of_a_failed_step_are_never_read() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.launch()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].known_key)) == 16
    engine.device.fail_steps = {0}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].known_key)) == 0
    engine.run_to_the_end()


def test_a_request_is_not_blamed_for_the_step_of_one_that_was_cancelled() -> None:
    engine = Engine()
    culprit, other = (engine.add(prompt(9, first=i), max_tokens=6) for i in range(2))
    engine.failing_ids = {culprit.id}
    while not (culprit.recovery.is_retried and other.recovery.is_retried and culprit.n_in_flight):
        engine.turn()
    engine.abort(culprit)
    assert engine.launch() is None, "no other request is retried while the aborted one's step is in flight"
    engine.run_to_the_end()
    assert engine.ended[other.id].reason == "length"


class RarelyCheckedEngine(Engine):
    """An engine for hundreds of rows: it checks its invariants in one of 64 half-steps."""

    n_half_steps = 0

    def check_invariants(self) -> None:
        self.n_half_steps += 1
        self.device.free_pages = set(self.free_pages)
        if self.n_half_steps % 64 == 1:
            super().check_invariants()


def engine_with_requests(n_rows: int, **options: Any) -> tuple[Engine, list[Request]]:
    engine = RarelyCheckedEngine(16 * n_rows, max_num_seqs=n_rows + 4, max_num_batched_tokens=32 * n_rows)
    return engine, [engine.add(prompt(9 + i % 5, first=i), max_tokens=20, **options) for i in range(n_rows)]


def fail_steps_of(engine: Engine, is_broken: Callable[[Row, Request], bool]) -> None:
    """Makes each step fail that has a broken row, when its result is awaited."""
    launch = engine.device.launch

    def launch_or_fail(plan: StepPlan) -> SampledStep:
        if any(is_broken(row, engine.rows[plan.step, row.batch_slot]) for row in plan.rows):
            engine.device.fail_steps.add(plan.step)
        return launch(plan)

    engine.device.launch = launch_or_fail  # type: ignore[method-assign]


def check_that_only_one_fails(engine: Engine, culprit: Request) -> None:
    assert engine.ended[name_of(culprit)].reason == "device_error"
    others = {ended.reason for name, ended in engine.ended.items() if engine.requests[name].id != culprit.id}
    assert others == {"length"}
    engine.check_outputs()
    engine.check_idle()


@pytest.mark.parametrize("n_rows", rest_nightly([40, 256], kept=(0,)))
@pytest.mark.parametrize("phase", rest_nightly(["prompt", "decode"], kept=(1,)))
def test_of_many_rows_only_the_one_that_breaks_its_steps_fails(phase: str, n_rows: int) -> None:
    engine, requests = engine_with_requests(n_rows)
    culprit = requests[n_rows // 2]
    fail_steps_of(
        engine, lambda row, request: request is culprit and (phase == "prompt" or row.start >= culprit.n_prompt + 3)
    )
    engine.run()
    check_that_only_one_fails(engine, culprit)


@pytest.mark.parametrize("n_rows", rest_nightly([40, 256], kept=(0,)))
def test_a_step_of_many_rows_that_fails_once_fails_no_request(n_rows: int) -> None:
    engine, _ = engine_with_requests(n_rows)
    engine.device.fail_steps = {10}
    engine.run_to_the_end("length")


def test_each_request_of_a_failed_step_is_retried_alone_while_the_others_go_on_in_between() -> None:
    engine = Engine()
    retried = {engine.add(prompt(9, first=i), max_tokens=6) for i in range(4)}
    engine.turn()
    engine.device.fail_steps = {engine.pending[0][0].step}
    engine.collect()
    others = {engine.add(prompt(9, first=i), max_tokens=30) for i in range(4, 6)}
    alone: list[Request] = []
    n_tokens_of_others = []
    while any(request.recovery.is_retried for request in retried):
        plan = engine.launch()
        rows = [engine.rows[plan.step, row.batch_slot] for row in plan.rows]
        if any(request.recovery.is_retried for request in rows):
            alone += rows
            assert len(rows) == 1
        assert engine.launch() is None, "nothing is in flight beside a retry"
        engine.collect()
        n_tokens_of_others.append(sum(request.n_outputs for request in others))
    assert set(alone) == retried
    assert len(alone) == 2 * len(retried), "a step for the prompt, and one that decodes"
    assert all(n < later for n, later in zip(n_tokens_of_others, n_tokens_of_others[2:], strict=False))
    engine.run_to_the_end("length")


def test_a_retried_request_starts_beside_short_ones_that_never_end() -> None:
    engine = Engine(32, 4, max_num_seqs=8, max_num_batched_tokens=128)
    retried = engine.add(prompt(100), max_tokens=4)
    engine.launch()
    engine.device.fail_steps = {0}
    engine.collect()
    for i in range(60):
        for first in (i, 100 + i):
            engine.add([i, first, *prompt(11, first=first)], max_tokens=8)
        engine.turn()
    assert retried.n_outputs, "others do not take the pages that it waits for"
    engine.run_to_the_end()


def test_a_retried_request_that_once_waited_for_pages_holds_back_nobody_after_its_retry() -> None:
    engine = Engine(16, 4)
    _, short, retried = (
        engine.add(prompt(n_prompt, first=n_prompt), max_tokens=max_tokens)
        for n_prompt, max_tokens in ((8, 44), (28, 6), (20, 40))
    )
    engine.launch()
    engine.device.fail_steps = {0}
    engine.collect()
    while short.phase is not Phase.FINISHED:
        assert retried.phase is Phase.WAITING, "it fits only after the short one has ended"
        engine.turn()
    engine.run_to_the_end()
    assert engine.scheduler.n_preemptions, "the first one's pages leave no room for the retried one's output"
    assert not retried.recovery.is_retried


@pytest.mark.parametrize("choice", [0, 2])
def test_a_choice_that_breaks_its_steps_fails_only_its_own_request(choice: int) -> None:
    engine, requests = engine_with_requests(6, n=3)
    culprit = engine.siblings[requests[2].id][choice]
    fail_steps_of(engine, lambda row, request: request is culprit and row.start >= culprit.n_prompt + 2)
    engine.run()
    check_that_only_one_fails(engine, culprit)


def test_the_choices_of_a_retried_request_fork_and_go_on() -> None:
    engine = Engine()
    leader = engine.add(prompt(9), max_tokens=6, n=3)
    engine.device.fail_steps = {0}
    while not leader.n_outputs:
        engine.turn()
    forks = engine.siblings[leader.id][1:]
    assert leader.recovery.is_retried
    assert [fork.phase for fork in forks] == [Phase.RUNNING] * 2
    engine.run_to_the_end("length")


def test_the_rows_of_both_launched_plans_are_retried() -> None:
    engine, requests = engine_with_requests(6)
    engine.turn(3)
    late = engine.add(prompt(9, first=9), max_tokens=20)
    engine.launch()
    engine.device.fail_steps = {engine.pending[0][0].step}
    assert late in engine.rows.values()
    engine.collect()
    assert all(request.recovery.is_retried for request in (*requests, late)), (
        "the late one was in the second plan only"
    )
    engine.run_to_the_end("length")


@pytest.mark.parametrize("n_turns", range(1, 12))
def test_requests_that_are_aborted_during_retries_leave_nothing_behind(n_turns: int) -> None:
    engine, requests = engine_with_requests(8)
    culprit = requests[5]
    engine.failing_ids = {culprit.id}
    while not culprit.recovery.is_retried:
        engine.turn()
    engine.turn(n_turns)
    aborted = [one for one in (*requests[::3], culprit) if one.phase is not Phase.FINISHED and one is not culprit]
    for request in aborted:
        engine.abort(request)
    engine.run_to_the_end()
    assert engine.ended[culprit.id].reason == "device_error"
    assert {engine.ended[one.id].reason for one in requests if one not in (culprit, *aborted)} == {"length"}


def test_a_prompt_chunk_of_one_token_does_not_end_a_retry() -> None:
    engine = Engine(64, 1, max_num_seqs=1, max_num_batched_tokens=1, shares=False)
    request = engine.add(prompt(30), max_tokens=4)
    engine.device.fail_steps = set(range(20, 1000, 20))
    engine.run(400)
    assert engine.ended[request.id].reason == "device_error"
    engine.check_idle()


@pytest.mark.parametrize("shares", [True, False])
def test_every_request_finishes_on_a_device_that_fails_overlapping_steps(shares: bool) -> None:
    """No request causes the failures, so none may fail: a retried request runs in steps that do not overlap, and
    gains at least one token before it joins the others again."""
    engine = Engine(max_num_batched_tokens=16, shares=shares)
    for i in range(4):
        engine.add(prompt(9 + 15 * i, first=i), max_tokens=6, n=1 + i % 2)
    launch, n_failures = engine.device.launch, 0

    def launch_or_fail(plan: StepPlan) -> SampledStep:
        nonlocal n_failures
        if engine.pending:
            n_failures += 1
            engine.device.fail_steps.add(plan.step)
        return launch(plan)

    engine.device.launch = launch_or_fail  # type: ignore[method-assign]
    engine.run(400)
    assert n_failures > 0
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


def test_a_refused_launch_keeps_the_previous_step() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.turn()
    engine.device.refuse_launches = 1
    engine.run_to_the_end("length")


def test_a_row_with_nan_kv_preempts_its_readers_and_is_computed_again_without_the_tree() -> None:
    engine = Engine()
    writer = engine.add(prompt(17), max_tokens=6)
    reader = engine.add(prompt(16) + [3], max_tokens=6)
    other = engine.add(prompt(20, first=5), max_tokens=6)
    engine.launch()
    engine.device.nan_slots = {writer.batch_slot}
    engine.collect()
    assert engine.output(other), "a request that does not share the path goes on"
    engine.run_to_the_end()
    assert writer.recovery.bypasses_tree
    assert not reader.recovery.bypasses_tree
    assert {ended.reason for ended in engine.ended.values()} == {"length"}


def test_nan_logits_over_computed_pages_leave_the_tree_unchanged() -> None:
    engine = Engine()
    engine.serve(prompt(17), max_tokens=1)
    second = engine.add(prompt(17), max_tokens=3)
    engine.launch()
    engine.device.nan_logits_slots = {second.batch_slot}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(second.known_key)) == 16
    engine.run_to_the_end()


def test_a_finite_row_does_not_mark_a_page_that_replaced_its_own_after_launch() -> None:
    engine = Engine()
    first = engine.add(prompt(15), max_tokens=8)
    engine.step()
    engine.launch()  # writes the KV of the first output token, which fills a page
    second = engine.add([*prompt(15), engine.output(first)[0], 5], max_tokens=2)
    engine.launch()  # the second request commits the same page, which this step writes
    engine.device.nan_slots = {second.batch_slot}
    engine.collect()
    assert first.block_table.pages[3] == second.block_table.pages[3], "the first request's page was a duplicate"
    engine.collect()
    engine.run_to_the_end()
    engine.check_bypasses()
    engine.check_idle()


def test_a_second_non_finite_row_fails_the_request() -> None:
    engine = Engine()
    request = engine.add(prompt(17), max_tokens=6)
    for _ in range(2):
        engine.launch()
        engine.device.nan_slots = {request.batch_slot}
        engine.collect()
    assert engine.ended[request.id].reason == "numerical_error"
    engine.run_to_the_end()
