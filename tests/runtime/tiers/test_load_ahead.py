"""Pages that are copied towards the device while the requests that need them wait, with a fake device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tiers.load_ahead import LoadAhead
from radixkv.settings.config import SchedulePolicy
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt, token_bytes
from support.evicting import evict_all

N_TOKENS = 16
"""Tokens of each prompt that is in the host tier: 4 pages."""


def waiting_engine(
    n_prompts: int = 4, n_answer: int = 60, cached: Sequence[list[int]] = (), **settings: Any
) -> Engine:
    """Returns an engine whose only row is taken, whose host tier has some prompts, and whose device has others."""
    defaults = {"n_pages": 64, "page_size": 4, "n_slots": 200, "max_num_seqs": 1, "num_reserved_decode_tokens": 0}
    engine = Engine(**{**defaults, **settings})
    for number in range(n_prompts):
        engine.serve(known(number), max_tokens=1)
    engine.store_all()
    engine.cache.flush()
    for tokens in cached:
        engine.serve(tokens, max_tokens=1)
    engine.add([90], max_tokens=n_answer)
    engine.turn()
    return engine


def loads(engine: Engine) -> int:
    """Returns the loads in flight."""
    return sum(copy.is_load for copy in engine.copier.in_flight)


def advance(engine: Engine, n_turns: int = 20) -> None:
    """Takes turns of the tiers alone."""
    for _ in range(n_turns):
        engine.scheduler.tiers.advance()
        engine.check_invariants()
        engine.finish_copies()


def known(number: int) -> list[int]:
    return [number, *prompt(N_TOKENS - 1, first=number + 1)]


def queue(engine: Engine, numbers: range | list[int]) -> list[Request]:
    return [engine.add([*known(number), 91, 92], max_tokens=1) for number in numbers]


def on_device(engine: Engine, n_prompts: int = 4) -> list[int]:
    return [engine.n_cached(known(number)) for number in range(n_prompts)]


def ahead(engine: Engine) -> tuple[int, int]:
    """Returns the pages loaded ahead, and those of them that were of use."""
    host, *_ = engine.scheduler.tiers.stats()
    assert host is not None
    return host.pages_loaded_ahead_total, host.pages_loaded_ahead_used_by_waiting_total


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_pages_of_waiting_requests_are_on_the_device_before_their_turn(policy: SchedulePolicy) -> None:
    engine = waiting_engine(schedule_policy=policy)
    waiting = queue(engine, range(4))
    engine.turn(20)
    assert all(request.phase is Phase.WAITING for request in waiting)
    assert on_device(engine) == [N_TOKENS] * 4
    engine.run_to_the_end()
    uses = [request.cache_use.counted for request in waiting]
    assert [(use.n_cached, use.n_loaded) for use in uses] == [(N_TOKENS, N_TOKENS)] * 4, "the host tier gave them"
    assert ahead(engine) == (16, 16)
    assert engine.host_tier.counters.n_pages_loaded == 16


def test_what_is_needed_first_comes_first_and_no_more_than_a_fourth_of_the_pool() -> None:
    engine = waiting_engine(6, schedule_policy="fcfs")
    queue(engine, [3, 0, 5, 1, 4, 2])
    engine.turn(30)
    assert on_device(engine, 6) == [N_TOKENS, N_TOKENS, 0, N_TOKENS, 0, N_TOKENS]
    engine.run_to_the_end()


def test_requests_that_start_at_once_load_for_themselves() -> None:
    engine = waiting_engine(n_answer=1)
    engine.run()
    (request,) = queue(engine, range(1))
    engine.run_to_the_end()
    assert request.cache_use.counted.n_loaded == N_TOKENS
    assert ahead(engine) == (0, 0)


@pytest.mark.parametrize("finishes", [False, True])
def test_an_abort_leaves_ordinary_cached_pages(finishes: bool) -> None:
    engine = waiting_engine()
    engine.finishes_copies = False
    (request,) = queue(engine, range(1))
    while not loads(engine):
        engine.turn()
    if finishes:
        engine.finish_copies()
        engine.turn()
    engine.abort(request)
    engine.finishes_copies = True
    engine.run()
    assert on_device(engine)[0] == N_TOKENS, "it stays cached"
    evict_all(engine.cache)
    assert ahead(engine) == (4, 0)
    engine.run_to_the_end()


@pytest.mark.parametrize(("n_cold", "is_loaded"), [(12, True), (8, False)])
def test_no_page_goes_that_a_waiting_prompt_needs_or_that_is_pinned(n_cold: int, *, is_loaded: bool) -> None:
    """The pool is full of them, but for one page, and of a sequence that nobody waits for."""
    needed, pinned, cold = prompt(32, first=50), prompt(16, first=51), prompt(n_cold, first=52)
    n_pages = 1 + (len(needed) + len(pinned) + n_cold) // 4 + 1
    engine = waiting_engine(4, n_pages=n_pages, schedule_policy="fcfs", cached=(needed, pinned, cold))
    engine.pins.pin(Namespace(), token_bytes(pinned), 1000.0)
    assert engine.cache.tree.retentions.n_pages == 4
    queue(engine, range(1))
    engine.add([*needed, 93], max_tokens=1, uses_tiers=False)
    advance(engine)
    assert (engine.n_cached(needed), engine.n_cached(pinned)) == (32, 16)
    assert on_device(engine)[0] == (N_TOKENS if is_loaded else 8)


def test_nothing_is_loaded_into_pages_that_running_requests_need() -> None:
    """A prompt that is being computed will take all pages but two, so that only two are loaded ahead."""
    engine = waiting_engine(2, n_answer=1, n_pages=40, max_num_batched_tokens=8, max_num_seqs=2)
    engine.run()
    long = engine.add(prompt(150, first=70), max_tokens=1)
    engine.turn()
    queue(engine, range(2))
    engine.turn(4)
    assert long.n_scheduled < 150
    assert 0 < sum(on_device(engine, 2)) <= 8
    engine.run_to_the_end()
    assert engine.scheduler.n_preemptions == 0


def test_a_load_for_a_request_whose_turn_it_is_has_the_link_alone() -> None:
    engine = waiting_engine(4, max_num_seqs=2, finishes_copies=False)
    (first,) = queue(engine, range(1))
    engine.turn()
    assert first.phase is Phase.LOADING
    engine.add(prompt(6, first=80), max_tokens=40)
    engine.turn()
    queue(engine, range(1, 4))
    engine.turn(6)
    assert loads(engine) == 1
    engine.finishes_copies = True
    engine.turn(12)
    assert on_device(engine) == [N_TOKENS] * 4
    engine.run_to_the_end()
    assert ahead(engine) == (12, 12)


def test_a_request_whose_turn_comes_joins_the_load_that_has_begun_for_it() -> None:
    engine = waiting_engine(n_answer=12)
    engine.finishes_copies = False
    (request,) = queue(engine, range(1))
    while request.phase is Phase.WAITING:
        engine.turn()
    assert request.phase is Phase.LOADING
    assert loads(engine) == 1
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert request.cache_use.counted.n_loaded == N_TOKENS
    assert engine.host_tier.counters.n_pages_loaded == 4


def test_a_load_that_fails_is_not_tried_again_ahead() -> None:
    engine = waiting_engine()
    engine.finishes_copies = False
    (request,) = queue(engine, range(1))
    while not loads(engine):
        engine.turn()
    engine.copier.finish(fails=True)
    engine.turn(10)
    assert not loads(engine)
    assert on_device(engine)[0] == 0
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert request.cache_use.counted.n_loaded == N_TOKENS, "it is loaded when its turn comes"


@pytest.mark.parametrize("is_shared", [False, True])
def test_pages_on_disk_come_to_the_host_tier_and_then_to_the_device(is_shared: bool) -> None:
    engine = waiting_engine(has_disk=True)
    evict_all(engine.host)
    engine.store.is_shared = is_shared
    if is_shared:
        engine.store.make_unknown(0)
    waiting = queue(engine, range(2))
    engine.turn(30)
    assert on_device(engine, 2) == [N_TOKENS] * 2
    engine.run_to_the_end()
    uses = [request.cache_use.counted for request in waiting]
    assert [(use.n_cached, use.n_loaded, use.n_fetched) for use in uses] == [(N_TOKENS,) * 3] * 2


def test_pages_are_fetched_where_the_device_has_no_room() -> None:
    engine = waiting_engine(4, has_disk=True, n_pages=24, n_answer=90)
    evict_all(engine.host)
    engine.cache.reserve(engine.requests["r4"].blocks, engine.n_pages)
    queue(engine, range(1))
    advance(engine)
    assert (engine.n_in_host(known(0)), on_device(engine)[0]) == (N_TOKENS, 0)


@dataclass(eq=False)
class Expected:
    """A conversation that is expected back."""

    namespace: Namespace
    key: bytes


def test_a_prompt_needs_no_request() -> None:
    engine = waiting_engine()
    expected = Expected(Namespace(), token_bytes([*known(2), 90]))
    copies = LoadAhead(engine.host_tier, lambda: [expected])
    copies.n_unclaimed = engine.scheduler.running.n_unclaimed
    for _ in range(5):
        copies.advance(may_begin=True)
        advance(engine, 1)
    assert on_device(engine) == [0, 0, N_TOKENS, 0]
    assert copies.settle(expected, N_TOKENS) is not None
    assert (copies.n_loaded, copies.n_used) == (4, 4)
    engine.check_invariants()


@pytest.mark.parametrize("states", [{"n_states": 8}, {"mixed_window": 4}])
def test_states_come_with_the_pages_before_them(states: dict[str, int]) -> None:
    engine = waiting_engine(2, **states)
    waiting = [engine.add([*known(number)[:-1], 3, 94, 95], max_tokens=1) for number in range(2)]
    first = [engine.cache.matches([(Namespace(), request.key)])[0] for request in waiting]
    in_host = [engine.host.matches([(Namespace(), request.key)])[0] for request in waiting]
    engine.turn(20)
    cached = [engine.cache.matches([(Namespace(), request.key)])[0] for request in waiting]
    assert cached == in_host
    assert first == [0, 0]
    assert min(in_host) > 0
    engine.run_to_the_end()
