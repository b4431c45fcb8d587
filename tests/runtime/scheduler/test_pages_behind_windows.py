"""Requests without a lease free their pages behind every layer's window while they run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from radixkv.runtime.assemble import holds_any_length
from radixkv.runtime.request import GREEDY, Request
from support.engine import Engine, prompt

WINDOW, BUDGET = 10, 16
MIN_PAGES = 8
"""A window and a row of ``BUDGET`` tokens in pages of four, and one more page."""


def windowed(n_pages: int, **settings: object) -> Engine:
    return Engine(n_pages, shares=False, window=WINDOW, max_num_batched_tokens=BUDGET, **settings)


def n_held(request: Request) -> int:
    return len(request.blocks.pages) - request.blocks.n_freed


def run_to_the_end(engine: Engine) -> None:
    engine.run_to_the_end("length")


def test_a_pool_of_a_window_and_a_row_holds_requests_of_any_length() -> None:
    engine = windowed(MIN_PAGES)
    assert engine.cache.windows.max_pages(BUDGET) == MIN_PAGES
    assert holds_any_length(engine.cache, BUDGET)
    for n_prompt in (150, 151, 3):
        engine.add(prompt(n_prompt), 90)
    run_to_the_end(engine)
    assert engine.scheduler.n_preemptions == 0


def test_a_decoding_request_holds_the_pages_of_its_window() -> None:
    engine = windowed(64)
    request = engine.add(prompt(50), 60)
    while not engine.ended:
        engine.turn()
        if request.is_decoding and request.n_outputs > 3:
            # The last token known, at most two that are launched, and the positions before them in their windows.
            assert n_held(request) <= engine.cache.pages_for(WINDOW + 2) + 1
            assert request.blocks.n_freed >= (request.n_known - 1 - WINDOW) // 4
    run_to_the_end(engine)


def test_a_request_waits_for_its_own_pages_and_preempts_nothing() -> None:
    """While a chunk is launched, there is no room for the next one: the pages behind the window come back first."""
    engine = windowed(MIN_PAGES + 3)
    short = engine.add(prompt(5, first=2), 5)
    engine.turn()
    long = engine.add(prompt(200), 5)
    run_to_the_end(engine)
    assert engine.scheduler.n_preemptions == 0
    assert short.n_outputs == long.n_outputs == 5


def test_a_preempted_request_starts_again() -> None:
    engine = windowed(2 * MIN_PAGES)
    engine.add(prompt(9), 80)
    request = engine.add(prompt(70, first=2), 60)
    while request.n_outputs < 20:
        engine.turn()
    assert request.blocks.n_freed > 0
    engine.scheduler.running.preempt(request, discards_results=False)
    run_to_the_end(engine)


@pytest.mark.parametrize("n_prompt", [11, 12, 13, 14, 61])
def test_forks_copy_the_window_only(n_prompt: int) -> None:
    engine = windowed(64)
    leader = engine.add(prompt(n_prompt), 30, n=3, sampling=replace(GREEDY, temperature=1.0, seed=5))
    while not leader.n_outputs:
        engine.turn()
    for follower in engine.siblings[leader.id][1:]:
        # A fork computes the last token of the prompt again.
        assert follower.blocks.n_freed == (n_prompt - WINDOW) // 4
        assert n_held(follower) == engine.cache.pages_for(n_prompt) - (n_prompt - WINDOW) // 4
    run_to_the_end(engine)


def test_a_leader_frees_the_pages_that_its_fork_has_copied() -> None:
    """None of its rows frees them: the last one ended before the copy did, and there is no room for another."""
    engine = Engine(6, 16, shares=False, window=10, max_num_batched_tokens=18, max_num_seqs=8)
    for n_prompt, n_outputs in ((28, 31), (47, 56)):
        sampling = replace(GREEDY, temperature=1.0, seed=5)
        engine.add(prompt(n_prompt, first=n_prompt), n_outputs, n=2, sampling=sampling)
    n_stalled = 0
    while not engine.scheduler.is_idle:
        engine.turn()
        is_stalled = any(
            engine.cache.windows.n_behind(request.blocks, request.n_scheduled) > request.blocks.n_freed
            for request in engine.scheduler.running
            if not (request.n_in_flight or request.n_pending_copies)
        )
        n_stalled = n_stalled + 1 if is_stalled else 0
        assert n_stalled < 2
    run_to_the_end(engine)


def test_pages_of_the_tree_stay() -> None:
    engine = Engine(64, window=WINDOW)
    request = engine.add(prompt(50), 30)
    while not engine.ended:
        engine.turn()
        assert request.block_table is None or request.blocks.n_freed == 0
    assert not holds_any_length(engine.cache, 64)
    run_to_the_end(engine)
    assert engine.cache.matches([(request.namespace, bytes(request.known_key))]) == [76]


def test_a_pool_without_room_for_a_window_and_a_row_holds_whole_requests_only() -> None:
    assert not holds_any_length(windowed(MIN_PAGES - 1).cache, BUDGET)
    assert not holds_any_length(Engine(64, shares=False).cache, BUDGET)
