"""Answers with a ``kv_budget`` in pools that cannot hold them whole, and what goes again after a preemption."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.wire.kv_budget import largest_budget, most_pages
from runtime.paged_eviction.test_paged_eviction import reference
from support.cases import covering, rest_nightly
from support.engine import Engine, prompt
from support.fake_device import chain, page_score


def n_held(request: Request) -> int:
    """Returns how many pages a running request has."""
    blocks = request.blocks
    return len(blocks.pages) - blocks.n_dropped + len(blocks.replaced)


def run(engine: Engine, request: Request, *, preempts_at: int | None = None) -> tuple[dict[int, list[int]], int]:
    """Runs a request to its end; returns what rows skip by each position of the answer, and the most pages that it
    has had. It is preempted once it knows ``preempts_at`` tokens; positions after that are told again."""
    skipped: dict[int, list[int]] = {}
    n_most = 0
    while request.phase is not Phase.FINISHED:
        if request.n_known == preempts_at and request.phase is Phase.RUNNING:
            preempts_at, skipped = None, {}
            engine.scheduler.running.preempt(request, discards_results=False)
        plan = engine.launch()
        for row in () if plan is None else plan.rows:
            if engine.rows[plan.step, row.batch_slot] is request:
                n_most = max(n_most, n_held(request))
                for position in range(row.start, row.start + row.n_tokens):
                    skipped[position] = list(request.blocks.skipped)
        if len(engine.pending) > 1 or plan is None:
            engine.collect()
    return {position: skipped[position] for position in skipped if position >= request.n_prompt}, n_most


@pytest.mark.parametrize(
    ("page_size", "sizes", "n_before", "reads_cache"),
    covering([1, 2, 4], [(1, 2), (7, 2), (12, 3), (40, 3), (41, 7)], [2, 9, 20, 31], [True, False]),
)
def test_a_preempted_request_drops_the_same_pages_again(
    page_size: int, sizes: tuple[int, int], n_before: int, reads_cache: bool
) -> None:
    n_prompt, n_pages = sizes
    engine = Engine(128, page_size)
    tokens, budget = prompt(n_prompt), n_pages * page_size
    request = engine.add(tokens, 33, kv_budget=budget, reads_cache=reads_cache)
    skipped, _ = run(engine, request, preempts_at=n_prompt + n_before)
    whole = [*tokens, *engine.output(request)]
    scores = [page_score(chain(request.namespace, whole[:end])) for end in range(page_size, len(whole), page_size)]
    expected = reference(scores, range(n_prompt, n_prompt + 32), budget, page_size)
    assert skipped == {position: expected[position] for position in skipped}
    assert skipped.keys() >= set(range(max(n_prompt, budget), n_prompt + 32))
    engine.run_to_the_end("length")


@pytest.mark.parametrize(
    ("page_size", "sizes", "n_before"), covering([1, 2, 4], [(1, 2), (12, 3), (40, 3), (41, 7)], [None, 100])
)
def test_an_answer_ends_in_the_pages_that_it_may_have(
    page_size: int, sizes: tuple[int, int], n_before: int | None
) -> None:
    n_prompt, n_pages = sizes
    n_most = most_pages(n_prompt, n_pages * page_size, page_size)
    engine = Engine(n_most, page_size)
    request = engine.add(prompt(n_prompt), 60 * page_size, kv_budget=n_pages * page_size)
    _, n_had = run(engine, request, preempts_at=None if n_before is None else n_prompt + n_before)
    assert n_had <= n_most
    engine.run_to_the_end("length")


@pytest.mark.parametrize("n_prompt", [1, 4, 30, 33, 60])
@pytest.mark.parametrize("n_pages", [6, 7, 20, 31])
def test_the_largest_budget_is_the_last_that_fits(n_prompt: int, n_pages: int) -> None:
    fitting = [budget for budget in range(4, 200) if most_pages(n_prompt, budget, 4) <= n_pages]
    largest = largest_budget(n_prompt, n_pages, 4)
    assert fitting[-1] - fitting[-1] % 4 == largest if fitting else largest <= 0


def test_two_long_answers_take_turns_in_a_pool_for_one() -> None:
    engine = Engine(most_pages(30, 16, 4), 4)
    requests = [engine.add(prompt(30, first), 150, kv_budget=16) for first in (1, 2)]
    engine.run_to_the_end("length")
    assert all(request.n_outputs == 150 for request in requests)


def test_a_preempted_request_is_admitted_with_the_pages_that_it_may_have() -> None:
    """Beside another one, in a pool that could not hold all its known tokens."""
    engine = Engine(3 * most_pages(20, 16, 4), 4)
    request = engine.add(prompt(20), 300, kv_budget=16)
    while request.n_outputs < 200:
        engine.turn()
    beside = engine.add(prompt(20, 5), 40)
    engine.turn(4)
    engine.scheduler.running.preempt(request, discards_results=False)
    engine.turn(4)
    assert (request.phase, beside.phase) == (Phase.RUNNING, Phase.RUNNING)
    assert request.n_known > engine.cache.n_pages * 4
    engine.run_to_the_end("length")


@pytest.mark.parametrize("n_before", rest_nightly([120, 250], kept=(0,)))
def test_a_preempted_request_loads_its_prompt_and_is_promised_the_pages_that_it_may_have(n_before: int) -> None:
    """It knows more tokens than the pool holds, or nearly as many."""
    engine = Engine(60, 4, n_slots=100)
    request = engine.add(prompt(40), 400, kv_budget=16)
    while request.n_outputs < n_before:
        engine.turn()
    engine.scheduler.running.preempt(request, discards_results=False)
    engine.add(prompt(220, 9), 8, priority=-1)
    n_promised = 0
    while not engine.scheduler.is_idle:
        engine.turn()
        n_promised = max(n_promised, engine.scheduler.tiers.n_promised)
    assert 0 < n_promised <= most_pages(40, 16, 4) - 40 // 4, "those beside the loaded ones"
    engine.run_to_the_end("length")
