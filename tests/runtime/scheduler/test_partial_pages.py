"""A cached page that shares only its first tokens with a prompt: they are copied, and the rest is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from radixkv.runtime.request import GREEDY, Request
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.tree.node import Namespace
from support.cases import covering
from support.engine import Engine, prompt

SHARED = prompt(24)
OTHER = [90, 91, 92, 93, 94, 95, 96, 97, 98]
"""Tokens that no other prompt has."""


def engine_with(cached: Sequence[int] = SHARED, **settings: object) -> Engine:
    """Returns an idle engine that has served one prompt."""
    engine = Engine(**settings)  # type: ignore[arg-type]
    engine.serve(cached, 1)
    return engine


def row_of(plan: StepPlan | None, request: Request) -> Row:
    (row,) = (row for row in plan.rows if row.batch_slot == request.batch_slot)
    return row


@pytest.mark.parametrize(("n_shared", "page_size"), covering(range(25), [1, 2, 4, 8]))
def test_all_tokens_that_a_cached_sequence_shares_are_cached(page_size: int, n_shared: int) -> None:
    engine = engine_with(page_size=page_size)
    request = engine.add(SHARED[:n_shared] + OTHER, 1)
    plan = engine.launch()
    row = row_of(plan, request)
    assert (row.start, row.write_start, row.n_tokens) == (n_shared, n_shared, len(OTHER))
    assert len(plan.copies) == bool(n_shared % page_size)
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == n_shared


@pytest.mark.parametrize("n_prompt", range(1, 25))
def test_the_last_token_is_computed_also_if_all_of_a_short_last_page_is_cached(n_prompt: int) -> None:
    engine = engine_with()
    request = engine.add(SHARED[:n_prompt], 3)
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == n_prompt - 1


@pytest.mark.parametrize(("n_shared", "n_cached"), [(18, 16), (19, 19)])
def test_fewer_tokens_than_the_minimum_are_computed(n_shared: int, n_cached: int) -> None:
    engine = engine_with(page_size=8, min_copied_tokens=3)
    request = engine.add(SHARED[:n_shared] + OTHER, 1)
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == n_cached


def test_of_several_pages_the_one_that_shares_most_is_copied() -> None:
    engine = engine_with(page_size=8)
    for n_shared in (17, 22, 19):
        engine.serve(SHARED[:n_shared] + OTHER, 1)
    branched = engine.add([*SHARED[:22], *OTHER[:1], 1, 2, 3], 1)
    engine.run_to_the_end()
    assert branched.cache_use.counted.n_cached == 23


def test_a_page_that_is_not_computed_yet_is_not_copied() -> None:
    engine = Engine()
    first, second = (engine.add(SHARED[:18] + OTHER[i:], 4) for i in range(2))
    assert engine.launch().copies == ()
    third = engine.add(SHARED[:18] + OTHER[2:], 4)
    assert engine.launch().copies == ()
    engine.run()
    fourth = engine.add(SHARED[:18] + OTHER[3:], 4)
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in (first, second, third, fourth)] == [0, 16, 16, 18]


def test_the_step_that_fills_the_copy_may_be_read_in_the_same_step() -> None:
    engine = engine_with()
    first, second = (engine.add(SHARED[:18] + OTHER[:8] + [i], 4) for i in range(2))
    assert len(engine.launch().copies) == 1
    engine.run_to_the_end()
    assert (first.cache_use.counted.n_cached, second.cache_use.counted.n_cached) == (18, 24)


def test_a_preempted_prompt_copies_what_another_one_has_computed_meanwhile() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=1)
    preempted = engine.add(SHARED, 1)
    engine.launch()  # the first chunk, of 8 tokens
    other = engine.add([*SHARED[:14], *OTHER[:2]], 1, priority=-1)
    engine.scheduler.running.preempt(preempted, discards_results=False)
    engine.run_to_the_end()
    assert other.cache_use.counted.n_cached == 8
    assert preempted.cache_use.counted.n_cached == 6, (
        "the first 8 tokens were computed before the preemption, the next 6 by the other"
    )


def test_an_eviction_takes_no_page_that_is_being_copied() -> None:
    engine = engine_with()
    request = engine.add(SHARED[:18] + OTHER, 4)
    ((source, _),) = engine.launch().copies
    filler = engine.cache.open(Namespace(), b"", bypasses_tree=True)
    assert engine.cache.reserve(filler, engine.cache.n_available)
    assert source not in filler.pages
    engine.cache.close(filler)
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == 18


def test_a_flush_during_the_copy_does_not_change_what_is_copied() -> None:
    engine = engine_with()
    request = engine.add(SHARED[:18] + OTHER, 4)
    engine.launch()
    engine.cache.flush()
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == 18


@pytest.mark.parametrize("refuses", [False, True], ids=["the step fails", "the launch is refused"])
def test_a_failed_step_lets_go_of_the_copied_page(refuses: bool) -> None:
    engine = engine_with()
    engine.add(SHARED[:18] + OTHER, 4)
    if refuses:
        engine.device.refuse_launches = 1
    else:
        engine.device.fail_steps.add(engine.device.executed[-1].step + 1)
    engine.run_to_the_end("length")


def test_an_abort_during_the_copy_frees_everything_after_the_step() -> None:
    engine = engine_with()
    request = engine.add(SHARED[:18] + OTHER, 4)
    engine.launch()
    engine.abort(request)
    engine.run_to_the_end()


def test_a_prompt_that_fits_only_without_the_page_it_could_copy_is_computed() -> None:
    engine = Engine(n_pages=8)
    engine.serve(prompt(16), 1)
    request = engine.add([*prompt(14), *range(60, 77)], 1)  # 31 tokens: all pages of the pool
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == 12


def test_choices_fork_from_a_leader_that_has_copied() -> None:
    engine = engine_with()
    leader = engine.add(SHARED[:18] + OTHER[:1], 6, n=3, sampling=replace(GREEDY, temperature=1.0, seed=5))
    engine.run_to_the_end()
    assert [choice.cache_use.counted.n_cached for choice in engine.siblings[leader.id]] == [18, 0, 0]


def test_other_namespaces_and_requests_that_read_no_cache_copy_nothing() -> None:
    engine = engine_with()
    salted = engine.add(SHARED[:18] + OTHER, 1, namespace=Namespace(salt="s"))
    unread = engine.add(SHARED[:18] + OTHER[1:], 1, reads_cache=False)
    scored = engine.add(SHARED[:18] + OTHER[2:], 1, n_prompt_logprobs=1)
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in (salted, unread, scored)] == [0, 0, 0]


def test_a_non_finite_row_does_not_spread_through_copies() -> None:
    engine = Engine()
    broken = engine.add(SHARED, 4)
    engine.launch()
    engine.device.nan_slots.add(broken.batch_slot)
    request = engine.add(SHARED[:18] + OTHER, 4)
    engine.run_to_the_end()
    engine.check_bypasses()
    assert engine.ended[request.id].reason == "length"


def test_a_part_of_a_page_is_copied_on_the_device_only() -> None:
    engine = engine_with(n_slots=40)
    assert engine.launch() is None  # starts to store what was computed
    engine.check_idle()
    filler = engine.cache.open(Namespace(), b"", bypasses_tree=True)
    assert engine.cache.reserve(filler, engine.cache.n_available)
    engine.cache.close(filler)
    loaded = engine.add(SHARED[:18] + OTHER, 1)
    engine.run_to_the_end()
    assert (loaded.cache_use.counted.n_cached, loaded.cache_use.counted.n_loaded) == (16, 16)
    copied = engine.add(SHARED[:18] + OTHER[:3] + [1], 1)
    engine.run_to_the_end()
    assert (copied.cache_use.counted.n_cached, copied.cache_use.counted.n_loaded) == (21, 0)
