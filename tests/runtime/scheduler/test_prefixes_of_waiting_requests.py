"""What waiting requests will find in the cache is evicted after what none of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from radixkv.runtime.request import Request
from radixkv.settings.config import EvictionPolicyName, SchedulePolicy
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt

N_PREFIX = 20
"""Tokens of each prefix that waiting requests need: 5 pages."""


def make_engine(n_pages: int = 48, **settings: Any) -> Engine:
    return Engine(n_pages, 4, max_num_seqs=1, num_reserved_decode_tokens=0, **settings)


def cache(engine: Engine, sequences: Sequence[list[int]], **options: Any) -> None:
    """Caches sequences; those that come later are used later."""
    for tokens in sequences:
        engine.serve(tokens, max_tokens=1, **options)


def prefix(number: int) -> list[int]:
    return [number, *prompt(N_PREFIX - 1, first=number)]


def fill(engine: Engine, n_tokens: int, first: int = 80, **options: Any) -> Request:
    """Starts a request that takes the only row, and grows by so many tokens."""
    request = engine.add([first], max_tokens=n_tokens, **options)
    engine.turn()
    return request


@pytest.mark.parametrize("schedule_policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("eviction_policy", ["lru", "lfuda", "adaptive"])
def test_pages_that_nobody_waits_for_go_first(
    schedule_policy: SchedulePolicy, eviction_policy: EvictionPolicyName
) -> None:
    """The waiting requests' prefixes have been used least recently, and as rarely as all others."""
    engine = make_engine(schedule_policy=schedule_policy, eviction_policy=eviction_policy)
    cache(engine, [prefix(number) for number in range(4)])
    cache(engine, [prompt(40, first=number) for number in (50, 51)])
    fill(engine, 100)
    waiting = [engine.add([*prefix(number), 90], max_tokens=1) for number in range(4)]
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in waiting] == [N_PREFIX] * 4


def test_what_is_needed_last_goes_first_once_all_is_needed() -> None:
    engine = make_engine(24, schedule_policy="fcfs")
    cache(engine, [prefix(number) for number in range(4)])
    fill(engine, 40)
    waiting = [engine.add([*prefix(number), 90], max_tokens=1) for number in (2, 0, 3, 1)]
    while not waiting[0].n_outputs:
        engine.turn()
    assert engine.n_cached(prefix(2)) == engine.n_cached(prefix(0)) == N_PREFIX
    assert engine.n_cached(prefix(1)) == 0
    engine.run_to_the_end()


def test_the_part_of_a_sequence_that_is_needed_stays() -> None:
    """A waiting prompt leaves a cached sequence within a run of pages: only the pages before that are needed."""
    engine = make_engine(24, schedule_policy="fcfs")
    long = prefix(1) + prompt(40, first=60)
    cache(engine, [long])
    fill(engine, 60)
    request = engine.add([*prefix(1), 90, 91], max_tokens=1)
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached - request.cache_use.counted.n_copied == N_PREFIX


def test_a_request_that_leaves_the_queue_needs_nothing_any_more() -> None:
    """The order of eviction is then as if it had never waited: a wait is no use of the pages."""
    left: list[list[int]] = []
    for waits in (False, True):
        engine = make_engine()
        cache(engine, [prompt(40, first=50), *(prefix(number) for number in range(6))])
        running = fill(engine, 120)
        for number in range(6) if waits else ():
            engine.add([*prefix(number), 90], max_tokens=1)
        while running.n_outputs < 60:
            engine.turn()
        assert 0 < engine.n_cached(prompt(40, first=50)) < 40
        for request in list(engine.scheduler.waiting):
            engine.abort(request)
        while running.n_outputs < 110:
            engine.turn()
        left.append([engine.n_cached(prefix(number)) for number in range(6)])
        engine.run()
    assert left[0] == left[1]
    assert left[0][0] == 0 < left[0][-1]


def test_a_request_without_the_cache_needs_nothing() -> None:
    engine = make_engine()
    cache(engine, [prefix(0), *(prompt(40, first=number) for number in (50, 51, 52))])
    running = fill(engine, 120)
    engine.add([*prefix(0), 90], max_tokens=1, reads_cache=False)
    while running.n_outputs < 80:
        engine.turn()
    assert engine.n_cached(prefix(0)) == 0
    assert engine.n_cached(prompt(40, first=52)) == 40


def test_prefixes_that_are_cached_while_a_request_waits_stay_too() -> None:
    """The second request computes a prefix that the third, which has waited since before, will need."""
    engine = make_engine(40, schedule_policy="fcfs")
    cache(engine, [prompt(40, first=50)])
    fill(engine, 8)
    engine.add([*prefix(0), 91], max_tokens=1)
    engine.add([95], max_tokens=100)
    late = engine.add([*prefix(0), 90], max_tokens=1)
    cached_then = engine.n_cached(prefix(0))
    engine.run()
    assert (cached_then, late.cache_use.counted.n_cached) == (0, N_PREFIX)


@pytest.mark.parametrize("has_shares", [False, True])
def test_each_tenants_requests_keep_their_prefixes(has_shares: bool) -> None:
    shares = {"min_page_share": 0.1} if has_shares else {}
    tenants = [TenantConfig(name, 1.0, cache_salt="tenant", **shares) for name in ("a", "b")]
    engine = make_engine(60, tenants=tenants)
    for name in ("a", "b"):
        options = {"tenant": name, "namespace": Namespace(name)}
        cache(engine, [prefix(number) for number in range(2)], **options)
        cache(engine, [prompt(40, first=50)], **options)
    fill(engine, 140, tenant="a", namespace=Namespace("a"))
    waiting = [
        engine.add([*prefix(number), 90], max_tokens=1, tenant=name, namespace=Namespace(name))
        for name in ("a", "b")
        for number in range(2)
    ]
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in waiting] == [N_PREFIX] * 4


@pytest.mark.parametrize("has_disk", [False, True])
def test_the_host_tier_keeps_what_waiting_requests_will_load(has_disk: bool) -> None:
    engine = make_engine(60, n_slots=40, has_disk=has_disk, max_num_batched_tokens=16)
    cache(engine, [prefix(0)])
    cache(engine, [prompt(40, first=number) for number in (50, 51)])
    engine.cache.flush()
    if has_disk:
        engine.store.pages.clear()
    running = engine.add(prompt(140, first=70), max_tokens=40)
    engine.turn()
    request = engine.add([*prefix(0), 90], max_tokens=1)
    engine.run_to_the_end()
    assert running.cache_use.counted.n_cached == 0
    assert (request.cache_use.counted.n_cached, request.cache_use.counted.n_loaded) == (N_PREFIX, N_PREFIX)


def test_the_store_spares_what_waiting_requests_will_fetch() -> None:
    """These are the last pages that it has of their prompts. None is spared once they have left the queue."""
    engine = make_engine(60, n_slots=60, has_disk=True, max_num_batched_tokens=16, schedule_policy="fcfs")
    cache(engine, [prefix(number) for number in range(3)])
    keys = {number: engine.store_keys(prefix(number)) for number in range(3)}
    assert engine.store.run(keys[0]) == len(keys[0]) == N_PREFIX // 4
    engine.add(prompt(140, first=70), max_tokens=40)
    engine.turn()
    waiting = [engine.add([*prefix(number), 90], max_tokens=1) for number in (2, 0)]
    engine.turn(6)
    assert engine.store.spared == [keys[2][-1], keys[0][-1]]
    for request in waiting:
        engine.abort(request)
    engine.run()
    assert engine.store.spared == []
