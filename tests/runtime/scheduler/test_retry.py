"""What the scheduler makes of steps that fail, and of rows that are not finite."""

from __future__ import annotations

import pytest

from radixkv.config import SchedulerConfig
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import Pending
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
    engine.check_answers()
    engine.check_idle()


def test_what_a_failed_step_was_to_write_is_never_read() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.launch()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].tokens)) == 16
    engine.device.fail_steps = {0}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(engine.requests["r0"].tokens)) == 0
    engine.run()
    engine.check_answers()


def test_a_request_whose_step_fails_alone_and_again_ends_in_error() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.device.fail_steps = {0, 1, 2, 3}
    engine.run()
    assert engine.ended["r0"].reason == "device_error"
    engine.check_idle()


def test_a_request_that_breaks_its_steps_takes_no_other_along() -> None:
    engine = Engine()
    requests = [engine.add(prompt(9 + i, first=i), max_tokens=6) for i in range(7)]
    engine.breaking = {requests[3].id}
    engine.run()
    assert engine.ended.pop(requests[3].id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_answers()
    engine.check_idle()


def test_a_request_is_not_blamed_for_the_step_of_one_that_was_cancelled() -> None:
    engine = Engine()
    culprit, other = (engine.add(prompt(9, first=i), max_tokens=6) for i in range(2))
    engine.breaking = {culprit.id}
    while not (culprit.max_retry_rows == other.max_retry_rows == 1 and culprit.n_in_flight):
        engine.turn()
    engine.abort(culprit)
    assert engine.launch() is None, "nobody takes the place while the cancelled one's step is still to fail"
    engine.run()
    assert engine.ended[other.id].reason == "length"
    engine.check_answers()
    engine.check_idle()


def turns_of(engine: Engine) -> int:
    """To the end."""
    for n_turns in range(10_000):
        if engine.scheduler.is_idle:
            return n_turns
        engine.turn()
    raise AssertionError("the engine does not come to an end")


def crowd(n_rows: int) -> tuple[Engine, list[Request]]:
    engine = Engine(512, 4, SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512))
    return engine, [engine.add(prompt(9 + i % 5, first=i), max_tokens=40) for i in range(n_rows)]


def test_a_step_that_fails_once_costs_a_few_turns_and_nobody_an_answer() -> None:
    engine, _ = crowd(24)
    undisturbed = turns_of(engine)
    engine, _ = crowd(24)
    engine.device.fail_steps = {10}
    assert turns_of(engine) < undisturbed + 12
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_answers()
    engine.check_idle()


@pytest.mark.parametrize("place", [0, 11, 23])
def test_a_request_that_breaks_its_steps_costs_the_others_a_few_turns(place: int) -> None:
    engine, _ = crowd(24)
    undisturbed = turns_of(engine)
    engine, requests = crowd(24)
    engine.breaking = {requests[place].id}
    assert turns_of(engine) < undisturbed + 40
    assert engine.ended.pop(requests[place].id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_answers()
    engine.check_idle()


def test_who_is_retried_is_alone_with_those_whose_step_failed_too() -> None:
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
    engine.check_answers()


def test_a_request_whose_prompt_goes_well_and_whose_next_token_never_does_ends_alone() -> None:
    engine, requests = crowd(8)
    culprit, launch = requests[3], engine.device.launch

    def launched(plan: StepPlan) -> Pending:
        if any(row.batch_slot == culprit.batch_slot and row.n_tokens == 1 for row in plan.rows):
            engine.device.fail_steps.add(plan.step)
        return launch(plan)

    engine.device.launch = launched  # type: ignore[method-assign]
    assert turns_of(engine) < 200
    assert engine.ended.pop(culprit.id).reason == "device_error"
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_answers()
    engine.check_idle()


def test_a_chunk_of_one_token_acquits_nobody() -> None:
    engine = Engine(64, 1, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1), shares=False)
    request = engine.add(prompt(30), max_tokens=4)
    engine.device.fail_steps = set(range(20, 1000, 20))
    engine.run(400)
    assert engine.ended[request.id].reason == "device_error"
    engine.check_idle()


@pytest.mark.parametrize("shares", [True, False])
def test_a_device_that_fails_whenever_steps_overlap_brings_every_request_to_its_end(shares: bool) -> None:
    """Nobody is to blame, so nobody is: who is retried, in steps that overlap with none, gets on by a token at
    least before it goes on with the others."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
    engine = Engine(64, 4, config, shares=shares)
    for i in range(4):
        engine.add(prompt(9 + 15 * i, first=i), max_tokens=6, n=1 + i % 2)
    launch, n_failures = engine.device.launch, 0

    def launched(plan: StepPlan) -> Pending:
        nonlocal n_failures
        if engine.pending:
            n_failures += 1
            engine.device.fail_steps.add(plan.step)
        return launch(plan)

    engine.device.launch = launched  # type: ignore[method-assign]
    engine.run(400)
    assert n_failures > 0
    assert {ended.reason for ended in engine.ended.values()} == {"length"}
    engine.check_answers()
    engine.check_idle()


def test_a_refused_launch_keeps_the_step_before() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=6)
    engine.turn()
    engine.device.refuse_launches = 1
    engine.run()
    engine.check_answers()
    engine.check_idle()
    assert engine.ended["r0"].reason == "length"


def test_a_row_with_nan_kv_takes_its_readers_back_to_the_queue_and_is_retried_alone() -> None:
    engine = Engine()
    writer = engine.add(prompt(17), max_tokens=6)
    reader = engine.add(prompt(16) + [3], max_tokens=6)
    other = engine.add(prompt(20, first=5), max_tokens=6)
    engine.launch()
    engine.device.nan_slots = {writer.batch_slot}
    engine.collect()
    assert engine.output(other), "a request that does not share the path goes on"
    engine.run()
    engine.check_answers()
    engine.check_idle()
    assert writer.bypasses_tree
    assert not reader.bypasses_tree
    assert {ended.reason for ended in engine.ended.values()} == {"length"}


def test_nan_logits_over_kv_that_a_finite_row_has_covered_leave_the_tree_alone() -> None:
    engine = Engine()
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    second = engine.add(prompt(17), max_tokens=3)
    engine.launch()
    engine.device.nan_logits_slots = {second.batch_slot}
    engine.collect()
    assert engine.cache.tree.match(Namespace(), bytes(second.tokens)) == 16
    engine.run()
    engine.check_answers()


def test_a_finite_row_does_not_vouch_for_a_page_that_replaced_its_own_after_its_launch() -> None:
    engine = Engine()
    first = engine.add(prompt(15), max_tokens=8)
    engine.launch()
    engine.collect()
    engine.launch()  # writes the first token of the answer, and with it fills a page
    second = engine.add([*prompt(15), engine.output(first)[0], 5], max_tokens=2)
    engine.launch()  # the second request commits the same page, which this step writes
    engine.device.nan_slots = {second.batch_slot}
    engine.collect()
    assert first.block_table is not None
    assert second.block_table is not None
    assert first.block_table.pages[3] == second.block_table.pages[3], "the first request's page was a duplicate"
    engine.collect()
    engine.run()
    engine.check_answers()
    engine.check_quarantine()
    engine.check_idle()


def test_a_second_nan_is_the_requests_error() -> None:
    engine = Engine()
    request = engine.add(prompt(17), max_tokens=6)
    for _ in range(2):
        engine.launch()
        engine.device.nan_slots = {request.batch_slot}
        engine.collect()
    assert engine.ended[request.id].reason == "numerical_error"
    engine.run()
    engine.check_idle()
