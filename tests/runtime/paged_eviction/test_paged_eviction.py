"""Which pages an answer with a ``kv_budget`` goes on without, against a plain reference and small cases by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.tree.node import Namespace
from support import fake_device
from support.engine import Engine, prompt
from support.fake_device import chain, page_score


def skipped_by_rows(engine: Engine, request: Request) -> dict[int, list[int]]:
    """Runs a request to its end; returns what each row of its answer skips, by the row's position."""
    skipped: dict[int, list[int]] = {}
    while request.phase is not Phase.FINISHED:
        plan = engine.launch()
        for row in () if plan is None else plan.rows[: plan.n_decode]:
            if engine.rows[plan.step, row.batch_slot] is request and row.start >= request.n_prompt:
                skipped[row.start] = list(request.blocks.skipped)
        if len(engine.pending) > 1 or plan is None:
            engine.collect()
    return skipped


def reference(score: Sequence[float], starts: Sequence[int], budget: int, page_size: int) -> dict[int, list[int]]:
    """Returns what the rows at ``starts`` skip, by the rules in words.

    Before each row: while the pages that it reads, with the one of its token, are more than the budget has, the
    lowest goes of those that are full, but for the one that was filled last.
    """
    gone: list[int] = []
    skipped: dict[int, list[int]] = {}
    for position in starts:
        n_full = position // page_size
        while n_full + 1 - len(gone) > budget // page_size:
            left = [entry for entry in range(n_full - 1) if entry not in gone]
            gone.append(min(left, key=lambda entry: (score[entry], entry)))
        skipped[position] = sorted(gone)
    return skipped


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("n_prompt", [1, 7, 12, 40])
@pytest.mark.parametrize("n_pages", [2, 3, 7])
def test_the_lowest_pages_are_dropped(page_size: int, n_prompt: int, n_pages: int) -> None:
    engine = Engine(128, page_size)
    tokens, budget = prompt(n_prompt), n_pages * page_size + page_size - 1
    request = engine.add(tokens, 33, kv_budget=budget)
    skipped = skipped_by_rows(engine, request)
    whole = [*tokens, *engine.output(request)]
    scores = [page_score(chain(request.namespace, whole[:end])) for end in range(page_size, len(whole), page_size)]
    assert skipped == reference(scores, range(n_prompt, n_prompt + 32), budget, page_size)
    engine.run_to_the_end("length")


def test_each_request_drops_by_its_own_scores() -> None:
    """Three requests in the same steps, and one without a budget between them."""
    engine, page_size = Engine(256, 4), 4
    prompts = [prompt(n, first) for first, n in enumerate((21, 9, 38, 30))]
    requests = [
        engine.add(tokens, 40, kv_budget=budget) for tokens, budget in zip(prompts, (16, 12, 0, 20), strict=True)
    ]
    skipped: dict[Request, dict[int, list[int]]] = {request: {} for request in requests}
    while not engine.scheduler.is_idle:
        plan = engine.launch()
        for row in () if plan is None else plan.rows[: plan.n_decode]:
            request = engine.rows[plan.step, row.batch_slot]
            if row.start >= request.n_prompt:
                skipped[request][row.start] = list(request.blocks.skipped)
        if len(engine.pending) > 1 or (plan is None and engine.pending):
            engine.collect()
    for request, tokens, budget in zip(requests, prompts, (16, 12, 400, 20), strict=True):
        whole = [*tokens, *engine.output(request)]
        ends = range(page_size, len(whole), page_size)
        scores = [page_score(chain(request.namespace, whole[:end])) for end in ends]
        starts = range(len(tokens), len(tokens) + 39)
        assert skipped[request] == reference(scores, starts, budget, page_size)


def test_a_small_case_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of five pages of two tokens, scored 5, 1, 3, 2, 4, with a budget of three pages."""
    engine = Engine(64, 2)
    tokens, scores = prompt(10), {}
    for entry, score in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
        scores[chain(Namespace(), tokens[: 2 * entry + 2])] = score
    monkeypatch.setattr(fake_device, "page_score", lambda end: scores.get(end, 9.0))
    request = engine.add(tokens, 6, kv_budget=6)
    # The row at position 10 begins a sixth page, so three go: 1, 2, 3. The one at 12 begins a seventh: then 4 goes,
    # which is no longer the newest. The one at 14 begins an eighth: then 5.
    assert skipped_by_rows(engine, request) == {
        10: [1, 2, 3],
        11: [1, 2, 3],
        12: [1, 2, 3, 4],
        13: [1, 2, 3, 4],
        14: [0, 1, 2, 3, 4],
    }
    engine.run_to_the_end("length")
    assert request.kv_eviction is not None
    assert request.kv_eviction.use.fields == {"kv_budget": 6, "skipped_tokens": 10, "freed_tokens": 0}


def test_what_the_tree_has_is_skipped_and_what_it_has_not_is_freed() -> None:
    engine = Engine(64, 4)
    tokens = prompt(20)
    other = engine.add(tokens, 60)
    engine.turn(3)
    request = engine.add(tokens, 40, kv_budget=12)
    n_most = 0
    while request.phase is not Phase.FINISHED:
        engine.turn()
        if request.block_table is not None and request.blocks.skipped:
            n_most = max(n_most, len(request.blocks.private_pages))
    assert n_most <= 12 // 4 + 2, "beside the tree's it has the pages of its budget, and those that are being freed"
    use = request.kv_eviction.use  # type: ignore[union-attr]
    # The first row of the answer begins the sixth page and keeps three of them: no page of the answer is committed.
    n_pages = (20 + 40 - 1) // 4
    assert use.n_skipped + use.n_freed == (n_pages + 1 - 3) * 4
    assert 0 < use.n_skipped <= 20
    assert other.phase is Phase.RUNNING
    engine.run_to_the_end("length")


def test_nothing_is_committed_after_the_first_drop() -> None:
    engine = Engine(64, 4, n_slots=64)
    tokens = prompt(10)
    request = engine.serve(tokens, 30, kv_budget=24)
    engine.store_all()
    whole = [*tokens, *engine.output(request)]
    # The row at position 24 begins the seventh page and drops the first one. It is planned before it is known that
    # the sixth page is computed, so that is not committed any more.
    assert engine.n_cached(whole) == engine.n_in_host(whole) == 20
    later = engine.serve(whole, 4)
    assert later.cache_use.counted is not None
    assert later.cache_use.counted.n_cached == 20
    engine.run_to_the_end("length")


def test_a_preempted_request_begins_anew_with_all_pages() -> None:
    engine = Engine(64, 4)
    request, beside = engine.add(prompt(20), 30, kv_budget=8), engine.add(prompt(8, 3), 40)
    engine.turn(10)
    assert request.blocks.skipped
    engine.scheduler.running.preempt(request, discards_results=False)
    engine.turn()
    engine.turn()
    assert request.phase is Phase.RUNNING
    assert not request.blocks.skipped, "what it has to compute again reads all"
    engine.turn(3)
    assert request.blocks.skipped
    assert beside.phase is Phase.RUNNING
    engine.run_to_the_end("length")


def test_what_goes_again_after_a_preemption_counts_once_in_the_use_of_a_request() -> None:
    uses = []
    for is_preempted in (False, True):
        engine = Engine(128, 4)
        request = engine.add(prompt(40), 60, kv_budget=16)
        while request.n_outputs < 40:
            engine.turn()
        if is_preempted:
            engine.scheduler.running.preempt(request, discards_results=False)
        engine.run_to_the_end("length")
        assert request.kv_eviction is not None
        uses.append(request.kv_eviction.use)
    assert uses[0] == uses[1]


def test_others_are_not_held_up_by_a_request_that_waits_for_scores() -> None:
    engine = Engine(64, 4)
    first = engine.add(prompt(6), 20)
    engine.turn(3)
    request = engine.add(prompt(20, 3), 10, kv_budget=8)
    n_rows = []
    while request.n_outputs < 3:
        plan = engine.launch()
        assert plan is not None
        n_rows.append(len(plan.rows))
        if len(engine.pending) > 1:
            engine.collect()
    assert n_rows[:4] == [2, 1, 2, 2], "its second row comes a step later"
    assert first.n_outputs > 3
    engine.run_to_the_end("length")


def test_a_request_that_stays_within_its_budget_asks_for_no_scores() -> None:
    engine = Engine(64, 4)
    engine.serve(prompt(10), 10, kv_budget=28)
    assert not any(row.scored_pages for plan in engine.device.executed for row in plan.rows)
    engine.serve(prompt(10, 3), 19, kv_budget=28)
    assert any(row.scored_pages for plan in engine.device.executed for row in plan.rows)
