"""Several choices of one prompt: which rows they compute, how forks survive aborts, preemptions and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from radixkv.runtime.request import GREEDY, Phase, Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from support.engine import Engine, name_of, prompt

SAMPLED = replace(GREEDY, temperature=1.0, seed=5)


def finish_reasons(engine: Engine, leader: Request) -> list[str]:
    return [engine.ended[name_of(choice)].reason for choice in engine.siblings[leader.id]]


def forked(engine: Engine, n_prompt: int = 11, **settings: object) -> list[Request]:
    """Returns the choices of a request right after the fork: the next plan will have the copies."""
    leader = engine.add(prompt(n_prompt), 8, **{"n": 3, "sampling": SAMPLED, **settings})  # type: ignore[arg-type]
    engine.launch()
    engine.step()
    return engine.siblings[leader.id]


@pytest.mark.parametrize(
    ("n_prompt", "n_copied"),
    [(8, 0), (9, 0), (10, 1), (11, 1)],
    ids=["0 over", "1 over", "2 over", "3 over"],
)
def test_forks_compute_the_last_prompt_token_and_copy_its_partial_page(n_prompt: int, n_copied: int) -> None:
    engine = Engine()
    leader, *forks = forked(engine, n_prompt)
    plan = engine.launch()
    rows = {row.batch_slot: row for row in plan.rows}
    assert [(rows[f.batch_slot].start, rows[f.batch_slot].n_tokens) for f in forks] == [(n_prompt - 1, 1)] * 2
    assert len(plan.copies) == 2 * n_copied
    for fork in forks:
        assert fork.block_table.pages[:2] == leader.block_table.pages[:2]
        assert fork.block_table.pages[2:] != leader.block_table.pages[2:] or n_prompt == 8
    engine.run_to_the_end()
    assert [choice.cache_use.counted.n_cached for choice in (leader, *forks)] == [0, 0, 0]


def test_each_choice_equals_a_single_request_with_its_seed() -> None:
    engine = Engine()
    leader = engine.add(prompt(10), 8, n=4, sampling=SAMPLED)
    singles = [engine.add(prompt(10), 8, sampling=replace(SAMPLED, seed=5 + i)) for i in range(4)]
    engine.run_to_the_end()
    together = [engine.output(choice) for choice in engine.siblings[leader.id]]
    assert together == [engine.output(single) for single in singles]
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.parametrize(
    "bypass", [{"reads_cache": False}, {"n_prompt_logprobs": 1}], ids=["no cache", "prompt logprobs"]
)
def test_choices_of_a_request_that_bypasses_the_cache_compute_the_prompt_once(bypass: dict[str, Any]) -> None:
    """Choices that wait for a slot find the prompt in the tree."""
    engine = Engine(max_num_seqs=2)
    leader = engine.add(prompt(60), 4, n=5, sampling=SAMPLED, **bypass)
    engine.run_to_the_end()
    assert engine.n_computed <= 60 + 4 * (1 + 3) + 5 * 3
    assert leader.cache_use.counted.n_cached == 0


def test_a_leader_that_finishes_at_its_first_token_keeps_its_tail_until_the_copies_are_done() -> None:
    engine = Engine()
    leader = engine.add(prompt(10), 1, n=2, sampling=SAMPLED)
    engine.step()
    assert leader.phase is Phase.FINISHED
    source = leader.block_table.pages[2]
    other = engine.add(prompt(30, first=3), 2)
    plan = engine.launch()
    assert [pair[0] for pair in plan.copies] == [source]
    assert source not in {page for row in plan.rows for page in row.table_pages}, "no row writes there meanwhile"
    engine.collect()
    assert leader.block_table is None
    engine.run_to_the_end()
    assert other.n_outputs == 2


@pytest.mark.parametrize("event", ["abort", "preempt", "recompute_without_tree"])
@pytest.mark.parametrize("shares", [True, False])
def test_a_leader_that_stops_before_the_copies_are_done_keeps_their_source_pages(event: str, shares: bool) -> None:
    engine = Engine(shares=shares)
    leader, *forks = forked(engine)
    if event == "abort":
        engine.abort(leader)
        engine.collect()
    elif event == "preempt":
        engine.scheduler.running.preempt(leader, discards_results=False)
        engine.collect()
    else:
        engine.device.nan_slots.add(leader.batch_slot)
        engine.collect()
    assert leader.n_in_flight == 0
    assert leader.block_table is not None, "the copies are not done yet"
    sources = {source for source, _ in engine.launch().copies}
    assert len(sources) == (1 if shares else 3)
    assert sources <= set(leader.block_table.pages)
    engine.collect()
    assert leader.phase is not Phase.PREEMPTED
    engine.run_to_the_end()
    assert all(engine.ended[name_of(fork)].reason == "length" for fork in forks)


def test_a_failed_step_with_the_copies_sends_the_forks_to_the_queue() -> None:
    engine = Engine()
    _, *forks = forked(engine)
    plan = engine.launch()
    assert plan.copies
    engine.device.fail_steps = {plan.step}
    while engine.pending:
        engine.collect()
    assert [fork.phase for fork in forks] == [Phase.WAITING] * 2
    engine.run_to_the_end()
    assert all(engine.ended[name_of(fork)].reason == "length" for fork in forks)


def test_aborting_forks_before_their_first_row_frees_the_leader() -> None:
    engine = Engine()
    leader, *forks = forked(engine)
    engine.abort(leader)
    engine.collect()
    assert leader.block_table is not None
    for fork in forks:
        engine.abort(fork)
    assert leader.block_table is None
    engine.run_to_the_end()


def test_a_source_page_that_is_replaced_as_a_duplicate_is_freed_after_the_copy() -> None:
    engine = Engine()
    engine.serve(prompt(11), 4)
    leader = engine.add(prompt(11), 8, n=2)
    engine.launch()
    engine.step()
    source = leader.block_table.pages[2]
    engine.collect()  # the first output token fills the page, and the tree already has a page of the same tokens
    assert leader.block_table.pages[2] != source
    assert [retired.page for retired in leader.block_table.replaced] == [source]
    assert [pair[0] for pair in engine.launch().copies] == [source]
    engine.collect()
    engine.step()
    assert not leader.block_table.replaced
    engine.run_to_the_end()


def test_without_a_cache_all_pages_are_copied() -> None:
    engine = Engine(shares=False)
    forked(engine)
    assert len(engine.launch().copies) == 2 * 3
    engine.run_to_the_end()


def test_forks_lease_the_leaders_path_even_after_a_flush() -> None:
    engine = Engine()
    leader = engine.add(prompt(11), 8, n=3, sampling=SAMPLED)
    engine.launch()
    engine.cache.flush()
    engine.collect()
    assert not leader.block_table.can_commit
    for fork in engine.siblings[leader.id][1:]:
        assert fork.block_table.pages[:2] == leader.block_table.pages[:2]
    engine.run_to_the_end()
    assert engine.cache.n_free == engine.n_pages, "no page of a detached path is cached"


@pytest.mark.parametrize(
    ("settings", "n_pages"), [({"max_num_seqs": 2}, 64), ({}, 6)], ids=["batch_slots", "pages"]
)
def test_forks_without_a_slot_or_pages_wait_and_then_hit_the_prompt(settings: dict[str, int], n_pages: int) -> None:
    engine = Engine(n_pages, **settings)
    leader = engine.add(prompt(11), 12, n=5, sampling=SAMPLED)
    engine.step()
    choices = engine.siblings[leader.id]
    assert [c.phase for c in choices].count(Phase.WAITING) >= 2
    assert engine.scheduler.waiting.n_unstarted_beside(leader) == 0, (
        "they have had their first step, so they cannot time out"
    )
    engine.run_to_the_end()
    assert finish_reasons(engine, leader) == ["length"] * 5


@pytest.mark.parametrize("is_running", [False, True])
def test_the_next_choice_leads_when_the_leader_is_cancelled(is_running: bool) -> None:
    engine = Engine(max_num_batched_tokens=11)
    leader = engine.add(prompt(30), 4, n=3, sampling=SAMPLED, n_prompt_logprobs=0)
    if is_running:
        engine.step()
        assert engine.prompt_logprobs[leader.id]
    engine.abort(leader)
    _, new_leader, last = engine.siblings[leader.id]
    assert new_leader.followers == [last]
    assert engine.scheduler.waiting.n_unstarted_beside(leader) == (not is_running), (
        "a request that has run cannot time out"
    )
    engine.run_to_the_end()
    assert finish_reasons(engine, leader) == ["abort", "length", "length"]
    assert len(engine.prompt_logprobs[leader.id]) == 29, "each position once, by either leader"


def test_a_non_finite_row_of_a_fork_does_not_affect_its_leader() -> None:
    engine = Engine()
    leader, *forks = forked(engine)
    engine.launch()
    engine.device.nan_logits_slots.add(forks[0].batch_slot)
    engine.collect()
    engine.collect()
    assert forks[0].recovery.bypasses_tree
    assert not leader.recovery.bypasses_tree
    engine.run_to_the_end()
    assert finish_reasons(engine, leader) == ["length"] * 3


def free_a_replaced_source_early(patch: pytest.MonkeyPatch) -> None:
    complete = Scheduler.complete

    def mutant(self: Scheduler, plan: StepPlan, result: StepResult) -> list[Update]:
        requests = self.launched_plans[0].requests
        updates = complete(self, plan, result)
        for request in requests:
            if request.block_table is not None:
                self.cache.free_replaced(request.block_table, plan.step)
        return updates

    patch.setattr(Scheduler, "complete", mutant)


def repeat_prompt_logprobs_after_promotion(patch: pytest.MonkeyPatch) -> None:
    promote_follower = Request.promote_follower

    def mutant(self: Request) -> Request:
        new_leader = promote_follower(self)
        new_leader.prompt_scoring.end = 1
        return new_leader

    patch.setattr(Request, "promote_follower", mutant)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (free_a_replaced_source_early, test_a_source_page_that_is_replaced_as_a_duplicate_is_freed_after_the_copy),
        (
            repeat_prompt_logprobs_after_promotion,
            lambda: test_the_next_choice_leads_when_the_leader_is_cancelled(is_running=True),
        ),
    ],
    ids=["free_a_replaced_source_early", "repeat_prompt_logprobs_after_promotion"],
)
def test_a_rare_mutant_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()
