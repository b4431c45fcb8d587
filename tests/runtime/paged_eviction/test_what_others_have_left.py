"""Preempted answers with a ``kv_budget`` beside exact pages of the same tokens, which other requests have left."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.wire.kv_budget import most_pages
from support.cases import rest_nightly
from support.engine import Engine, prompt

BUDGET = 16


def run_without_overlap(engine: Engine, request: Request) -> None:
    """Runs until a request has ended, each step after the result of the one before it."""
    for _ in range(2000):
        if request.phase is Phase.FINISHED:
            break
        engine.launch()
        engine.finish_copies()
        if engine.pending:
            engine.collect()
    engine.run_to_the_end("length")


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("n_before", [1, 10])
@pytest.mark.parametrize("counts_in_flight", [False, True])
def test_it_writes_to_no_page_that_another_request_has_left(
    page_size: int, n_before: int, counts_in_flight: bool
) -> None:
    engine = Engine(256, page_size)
    tokens = prompt(23)
    other = engine.add(tokens, 60)
    while other.n_outputs < 40:
        engine.turn()
    request = engine.add(tokens, 40, kv_budget=8)
    while request.n_outputs + (request.n_output_placeholders if counts_in_flight else 0) < n_before:
        engine.turn()
    engine.scheduler.running.preempt(request, discards_results=False)
    n_leased = 0
    while request.phase is not Phase.FINISHED:
        engine.turn()
        if request.block_table is not None:
            n_leased = max(n_leased, request.blocks.n_leased)
    assert n_leased == 23 // page_size, "it goes on from the pages of its prompt"
    engine.run_to_the_end("length")


@pytest.mark.parametrize("n_pages", rest_nightly([20, 24], kept=(0,)))
def test_it_needs_no_more_pages_than_without_them(n_pages: int) -> None:
    """The other request was as long as the pool, and its pages are in the host tier."""
    assert most_pages(20, BUDGET, 4) < n_pages
    engine = Engine(n_pages, 4, n_slots=60)
    engine.serve(prompt(20), n_pages * 4 - 20)
    engine.store_all()
    request = engine.add(prompt(20), 300, kv_budget=BUDGET)
    while request.n_outputs < n_pages * 4 - 26:
        engine.turn()
    engine.scheduler.running.preempt(request, discards_results=False)
    run_without_overlap(engine, request)


def test_it_ends_after_one_of_better_priority_that_needs_the_whole_pool() -> None:
    engine = Engine(40, 4)
    request = engine.add(prompt(20), 400, kv_budget=BUDGET)
    while request.n_outputs < 125:
        engine.turn()
    engine.add(prompt(20), 40 * 4 - 20, priority=-1)
    run_without_overlap(engine, request)
    assert engine.scheduler.n_preemptions == 1
