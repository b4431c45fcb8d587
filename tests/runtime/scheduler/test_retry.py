"""How the scheduler recovers from failed steps and from non-finite rows."""

from __future__ import annotations

import pytest

from radixkv.config import SchedulerConfig
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import PendingStep
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt


def test_a_failed_step_is_undone_and_its_requests_run_again() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.turn()
    engine.add(prompt(16) + [3], max_tokens=6)
    engine.turn()
    engine.device.fail_steps = {engine.pending[0][0].step}
    engine.run()
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


def test_pages_of_a_failed_step_are_never_read() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.launch()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].tokens)) == 16
    engine.device.fail_steps = {0}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].tokens)) == 0
    engine.run()
    engine.check_outputs()


def test_a_request_whose_step_fails_again_when_alone_ends_in_error() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.device.fail_steps = {0, 1, 2, 3}
    engine.run()
    assert engine.ended["r0"].reason == "device_error"
    engine.check_idle()


def test_a_request_that_breaks_its_steps_fails_no_other_request() -> None:
    engine = Engine()
    requests = [engine.add(prompt(9 + i, first=i), max_tokens=6) for i in range(7)]
    engine.failing_ids = {requests[3].id}
    engine.run()
    assert engine.ended.pop(requests[3].id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


def test_a_request_is_not_blamed_for_the_step_of_one_that_was_cancelled() -> None:
    engine = Engine()
    culprit, other = (engine.add(prompt(9, first=i), max_tokens=6) for i in range(2))
    engine.failing_ids = {culprit.id}
    while not (culprit.max_retry_rows == other.max_retry_rows == 1 and culprit.n_in_flight):
        engine.turn()
    engine.abort(culprit)
    assert engine.launch() is None, "no other request is retried while the aborted one's step is in flight"
    engine.run()
    assert engine.ended[other.id].reason == "length"
    engine.check_outputs()
    engine.check_idle()


def n_turns_to_the_end(engine: Engine) -> int:
    """Runs to the end; returns the number of turns."""
    for n_turns in range(10_000):
        if engine.scheduler.is_idle:
            return n_turns
        engine.turn()
    raise AssertionError("the engine does not come to an end")


def engine_with_requests(n_rows: int) -> tuple[Engine, list[Request]]:
    engine = Engine(512, 4, SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512))
    return engine, [engine.add(prompt(9 + i % 5, first=i), max_tokens=40) for i in range(n_rows)]


def test_a_step_that_fails_once_costs_a_few_turns_and_no_request() -> None:
    engine, _ = engine_with_requests(24)
    undisturbed = n_turns_to_the_end(engine)
    engine, _ = engine_with_requests(24)
    engine.device.fail_steps = {10}
    assert n_turns_to_the_end(engine) < undisturbed + 12
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


@pytest.mark.parametrize("position", [0, 11, 23])
def test_a_request_that_breaks_its_steps_costs_the_others_only_a_few_turns(position: int) -> None:
    engine, _ = engine_with_requests(24)
    undisturbed = n_turns_to_the_end(engine)
    engine, requests = engine_with_requests(24)
    engine.failing_ids = {requests[position].id}
    assert n_turns_to_the_end(engine) < undisturbed + 40
    assert engine.ended.pop(requests[position].id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


def test_retried_requests_share_steps_only_with_each_other() -> None:
    engine = Engine()
    suspects = {engine.add(prompt(9, first=i), max_tokens=6).id for i in range(4)}
    engine.turn()
    engine.device.fail_steps = {engine.pending[0][0].step}
    engine.collect()
    others = [engine.add(prompt(9, first=i), max_tokens=6) for i in range(4, 6)]
    while plan := engine.launch():
        together = {engine.rows[plan.step, row.batch_slot].id for row in plan.rows}
        assert len(together) <= 2
        assert together < suspects
        assert engine.launch() is None
        engine.collect()
        if not (engine.scheduler.running.has_retries or engine.scheduler.waiting.has_retries):
            break
    engine.run()
    assert engine.ended[others[0].id].reason == "length"
    engine.check_outputs()


def test_a_request_that_fails_only_when_decoding_ends_without_failing_others() -> None:
    engine, requests = engine_with_requests(8)
    culprit, launch = requests[3], engine.device.launch

    def launch_or_fail(plan: StepPlan) -> PendingStep:
        if any(row.batch_slot == culprit.batch_slot and row.n_tokens == 1 for row in plan.rows):
            engine.device.fail_steps.add(plan.step)
        return launch(plan)

    engine.device.launch = launch_or_fail  # type: ignore[method-assign]
    assert n_turns_to_the_end(engine) < 200
    assert engine.ended.pop(culprit.id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_outputs()
    engine.check_idle()


def test_a_prompt_chunk_of_one_token_does_not_end_a_retry() -> None:
    engine = Engine(64, 1, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1), shares=False)
    request = engine.add(prompt(30), max_tokens=4)
    engine.device.fail_steps = set(range(20, 1000, 20))
    engine.run(400)
    assert engine.ended[request.id].reason == "device_error"
    engine.check_idle()


@pytest.mark.parametrize("shares", [True, False])
def test_every_request_finishes_on_a_device_that_fails_overlapping_steps(shares: bool) -> None:
    """No request causes the failures, so none may fail: a retried request runs in steps that do not overlap, and
    gains at least one token before it joins the others again."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
    engine = Engine(64, 4, config, shares=shares)
    for i in range(4):
        engine.add(prompt(9 + 15 * i, first=i), max_tokens=6, n=1 + i % 2)
    launch, n_failures = engine.device.launch, 0

    def launch_or_fail(plan: StepPlan) -> PendingStep:
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
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    assert engine.ended["r0"].reason == "length"


def test_a_row_with_nan_kv_preempts_its_readers_and_is_retried_without_the_tree() -> None:
    engine = Engine()
    writer = engine.add(prompt(17), max_tokens=6)
    reader = engine.add(prompt(16) + [3], max_tokens=6)
    other = engine.add(prompt(20, first=5), max_tokens=6)
    engine.launch()
    engine.device.nan_slots = {writer.batch_slot}
    engine.collect()
    assert engine.output(other), "a request that does not share the path goes on"
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    assert writer.bypasses_tree
    assert not reader.bypasses_tree
    assert {ended.reason for ended in engine.ended.values()} == {"length"}


def test_nan_logits_over_computed_pages_leave_the_tree_unchanged() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    second = engine.add(prompt(17), max_tokens=3)
    engine.launch()
    engine.device.nan_logits_slots = {second.batch_slot}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(second.tokens)) == 16
    engine.run()
    engine.check_outputs()


def test_a_finite_row_does_not_mark_a_page_that_replaced_its_own_after_launch() -> None:
    engine = Engine()
    first = engine.add(prompt(15), max_tokens=8)
    engine.launch()
    engine.collect()
    engine.launch()  # writes the KV of the first output token, which fills a page
    second = engine.add([*prompt(15), engine.output(first)[0], 5], max_tokens=2)
    engine.launch()  # the second request commits the same page, which this step writes
    engine.device.nan_slots = {second.batch_slot}
    engine.collect()
    assert first.block_table is not None
    assert second.block_table is not None
    assert first.block_table.pages[3] == second.block_table.pages[3], "the first request's page was a duplicate"
    engine.collect()
    engine.run()
    engine.check_outputs()
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
    engine.run()
    engine.check_idle()
