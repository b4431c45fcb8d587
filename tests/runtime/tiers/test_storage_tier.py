"""Requests whose pages are on disk, with a fake device, a fake copier and a fake store."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tiers.fetch_rate import FetchRate
from radixkv.runtime.tiers.load_choice import CachedPrefixes
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.tree.node import Namespace
from support.engine import MESSAGE_ENDS, Engine, name_of, prompt, token_bytes
from support.evicting import evict_all
from support.fake_copier import STATE_PARTS


def restarted_engine(n_tokens: int = 40, **settings: object) -> Engine:
    """Returns an engine whose disk tier has a prompt that neither device nor host tier has."""
    engine = Engine(n_pages=32, page_size=4, n_slots=60, has_disk=True, **settings)
    engine.finishes_copies, finishes_copies = True, engine.finishes_copies
    engine.serve(prompt(n_tokens), max_tokens=1)
    engine.store_all()
    evict_all(engine.cache, engine.host)
    engine.check_invariants()
    engine.finishes_copies = finishes_copies
    return engine


def finish(engine: Engine) -> None:
    engine.finishes_copies = True
    engine.run_to_the_end()


def sources(request: Request) -> tuple[int, int, int]:
    return (
        request.cache_use.counted.n_cached,
        request.cache_use.counted.n_loaded,
        request.cache_use.counted.n_fetched,
    )


def test_a_prompt_comes_from_disk_through_the_host_tier() -> None:
    engine = restarted_engine()
    request = engine.add(prompt(40))
    finish(engine)
    assert sources(request) == (39, 39, 39)
    again = engine.add(prompt(40))
    finish(engine)
    assert sources(again) == (39, 0, 0), "the device has it"


def test_what_is_behind_a_lost_page_is_computed() -> None:
    engine = restarted_engine()
    engine.store.lose(4)
    request = engine.add(prompt(40))
    finish(engine)
    assert sources(request) == (16, 16, 16)


def test_what_is_behind_a_page_that_was_lost_meanwhile_is_not_looked_up_again() -> None:
    engine = restarted_engine(finishes_copies=False)
    engine.store.is_shared = True
    engine.store.make_unknown(0)
    request = engine.add(prompt(40))
    engine.turn()
    engine.store.finish()
    engine.turn()
    assert not engine.store.in_flight[0].is_look_up
    engine.store.lose(4)
    finish(engine)
    assert sources(request) == (16, 16, 16)
    assert engine.host_tier.disk.n_lookups == 1


def test_a_request_fetches_once_only_if_pages_cannot_be_read() -> None:
    engine = restarted_engine(finishes_copies=False)
    request = engine.add(prompt(40))
    for _ in range(200):
        engine.turn()
        engine.store.finish(n_pages=2)
        engine.copier.finish_all()
    assert request.phase is Phase.FINISHED, "it fetches without end"
    finish(engine)
    assert sources(request) == (8, 8, 8)
    assert engine.store.counts.n_lost == 0, "the store has them still"


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_request_waits_for_a_fetch_or_a_lookup_no_longer_than_for_its_first_step(is_shared: bool) -> None:
    engine = restarted_engine(finishes_copies=False, queue_timeout_s=5.0)
    if is_shared:
        engine.store.is_shared = True
        engine.store.make_unknown(0)
    request = engine.add(prompt(40))
    engine.turn()
    assert (request.phase, len(engine.store.in_flight)) == (Phase.LOADING, 1)
    engine.now += 4.0
    engine.expire()
    assert request.phase is Phase.LOADING
    engine.now += 2.0
    engine.expire()
    assert engine.ended[name_of(request)].reason == "queue_timeout"
    finish(engine)
    again = engine.add(prompt(40))
    finish(engine)
    assert again.cache_use.counted.n_loaded == 39, "what was fetched meanwhile is cached"


def test_an_abort_during_a_fetch() -> None:
    engine = restarted_engine(finishes_copies=False)
    request = engine.add(prompt(40))
    engine.turn()
    assert request.phase is Phase.LOADING
    engine.abort(request)
    again = engine.add(prompt(40))
    finish(engine)
    assert again.cache_use.counted.n_loaded == 39
    assert engine.host_tier.disk.counters.n_pages_loaded == 10, "the second request fetched again"


def test_a_flush_during_a_fetch() -> None:
    engine = restarted_engine(finishes_copies=False)
    engine.add(prompt(40))
    engine.turn()
    assert engine.store.in_flight
    engine.host_tier.flush()
    engine.cache.flush()
    again = engine.add(prompt(40))
    finish(engine)
    assert again.cache_use.counted.n_loaded == 0


def test_an_invalidation_during_a_fetch() -> None:
    engine = restarted_engine(finishes_copies=False)
    request = engine.add(prompt(40))
    engine.turn()
    assert engine.store.in_flight
    dropped = engine.invalidate(Namespace(), token_bytes(prompt(16)))
    assert (dropped.n_on_device, dropped.n_in_host, dropped.n_on_disk) == (0, 0, 10)
    finish(engine)
    assert sources(request) == (0, 0, 0)


def test_an_invalidation_after_a_fetch_was_read_drops_its_pages() -> None:
    engine = restarted_engine(finishes_copies=False)
    request = engine.add(prompt(40))
    engine.turn()
    engine.store.finish()
    engine.invalidate(Namespace(), token_bytes(prompt(16)))
    finish(engine)
    assert sources(request) == (0, 0, 0)
    assert engine.host_tier.disk.counters.n_pages_loaded == 10, "they were read, and not used"


def test_an_invalidation_leaves_what_another_sequence_needs() -> None:
    engine = Engine(n_pages=64, page_size=4, n_slots=60, has_disk=True)
    for last in (1, 2):
        engine.serve([*prompt(16), *prompt(8, first=last)], max_tokens=1)
    engine.store_all()
    assert engine.invalidate(Namespace(), token_bytes([*prompt(16), *prompt(8)])) == (2, 0, 2, 2)
    ends = (1, 0), (2, 8)
    for last, n_kept in ends:
        tokens = token_bytes([*prompt(16), *prompt(8, first=last)])
        for tier, values in engine.cached_values(Namespace(), tokens).items():
            assert len(values) * 4 == 16 + n_kept, tier


def test_an_invalidation_lets_the_writes_of_others_go_on() -> None:
    engine = Engine(n_pages=64, page_size=4, n_slots=60, has_disk=True)
    engine.serve(prompt(40), max_tokens=1)
    engine.scheduler.schedule()
    engine.copier.finish_all()
    engine.scheduler.schedule()
    assert engine.store.in_flight, "the prompt is not being written"
    engine.invalidate(Namespace(), token_bytes(prompt(8, first=2)))
    engine.store_all()
    assert engine.store.run(list(engine.store.pages)) == 10


def test_a_policy_of_never_fetches_nothing() -> None:
    engine = restarted_engine()
    engine.host_tier.choice.policy = "never"
    request = engine.add(prompt(40))
    finish(engine)
    assert sources(request) == (0, 0, 0)
    assert engine.host_tier.disk.counters.n_pages_loaded == 0


def test_a_fetch_is_tried_again_after_many_that_were_declined() -> None:
    engine = restarted_engine()
    host_tier, tokens = engine.host_tier, token_bytes(prompt(40))
    host_tier.choice.policy = "auto"
    host_tier.choice.cost.add_step(1000, 1000, 10.0)
    host_tier.choice.cost.fetch_rate(0).add(1, 100.0)  # the first read of a sleeping disk
    fetches = [host_tier.find_fetch(Namespace(), tokens, CachedPrefixes(0, 0)) for _ in range(40)]
    assert fetches[0] is None
    assert fetches[-1] is not None
    finish(engine)


def engine_with_half_in_the_host_tier(fetch_s_per_token: float) -> Engine:
    """Returns an engine whose host tier has 20 of 40 tokens that are on disk, where a load takes 1 ms a token and
    computing 100 ms."""
    engine = restarted_engine()
    engine.serve(prompt(20), max_tokens=1)
    host_tier, disk = engine.host_tier, engine.host_tier.disk
    host_tier.choice.policy, host_tier.choice.cost = "auto", LoadCost()
    disk.store.members[0].rate = FetchRate()
    host_tier.choice.cost.add_step(1000, 1000, 100.0)
    host_tier.choice.cost.add_load(1000, 1.0)
    disk.store.members[0].rate.add(1, fetch_s_per_token)
    evict_all(engine.cache)
    engine.check_invariants()
    return engine


@pytest.mark.parametrize(("fetch_s_per_token", "n_fetched"), [(0.05, 19), (0.11, 0)])
def test_a_gain_from_the_host_tier_does_not_pay_for_a_slow_disk(fetch_s_per_token: float, n_fetched: int) -> None:
    engine = engine_with_half_in_the_host_tier(fetch_s_per_token)
    request = engine.add(prompt(40))
    finish(engine)
    assert request.cache_use.counted.n_fetched == n_fetched
    assert request.cache_use.counted.n_loaded == 20 + n_fetched


def test_loads_from_the_host_tier_do_not_put_off_the_next_try_of_a_fetch() -> None:
    engine = engine_with_half_in_the_host_tier(0.11)
    n_fetched, host_tier = [], engine.host_tier
    for _ in range(34):
        fetch = host_tier.find_fetch(Namespace(), token_bytes(prompt(40)), CachedPrefixes(0, 20))
        n_fetched.append(0 if fetch is None else 20)
        assert engine.serve(prompt(20), max_tokens=1).cache_use.counted.n_loaded == 19
        evict_all(engine.cache)
        engine.check_invariants()
    assert n_fetched[:32] == [0] * 32
    assert 20 in n_fetched


def test_a_turn_looks_at_a_bounded_number_of_offers() -> None:
    engine = restarted_engine()
    disk = engine.host_tier.disk
    for _ in range(1000):
        disk.offer(Namespace(), token_bytes(prompt(40)))
    disk.advance()
    assert 900 < disk.n_offers < 1000
    while disk.n_offers:
        disk.advance()


def test_beams_without_room_for_others_of_their_group_do_not_wait_for_a_write_to_disk() -> None:
    engine = Engine(n_pages=64, n_slots=64, has_disk=True, finishes_copies=False, max_num_seqs=2)
    engine.add(prompt(20), max_tokens=12, n=6, is_beam_search=True)
    n_turns = 0
    while not engine.scheduler.is_idle:
        engine.turn()
        engine.copier.finish_all()
        n_turns += 1
        assert n_turns < 400, "the search has stopped"
    assert engine.store.in_flight, "the write has not ended"
    finish(engine)


CHAT = [0 if token in MESSAGE_ENDS else token for token in prompt(40)]
"""States are kept after 16 tokens and after 36."""


def key_of_state(engine: Engine, n_tokens: int, part: int) -> bytes:
    key = engine.store_keys(CHAT)[n_tokens // 4 - 1]
    return StateKeys(STATE_PARTS, 1, 16).all(key)[part]


def engine_with_states(*, is_shared: bool, knows_all: bool = False) -> Engine:
    """Returns an engine of which only the store has a prompt with its states; another server's, unless it knows
    all."""
    engine = Engine(n_pages=32, page_size=4, n_slots=60, n_states=8, has_disk=True)
    for n_tokens in (18, 38):
        engine.serve(CHAT[:n_tokens], max_tokens=1)
    engine.store_all()
    evict_all(engine.cache, engine.host)
    engine.check_invariants()
    engine.store.is_shared = is_shared
    if not knows_all:
        engine.store.make_unknown(0)
    return engine


def lose(engine: Engine, key: bytes) -> None:
    engine.store.lose(list(engine.store.pages).index(key))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_prompt_comes_with_its_state(is_shared: bool) -> None:
    engine = engine_with_states(is_shared=is_shared)
    request = engine.add(CHAT)
    finish(engine)
    assert sources(request) == (36, 36, 36)
    assert engine.host_tier.disk.n_lookups == is_shared
    fork = engine.add([*CHAT[:30], 5, 6, 7, 8, 9])
    finish(engine)
    assert sources(fork)[0] == 16


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("while_fetching", [False, True])
@pytest.mark.parametrize("what", ["first part", "last part", "page", "page after a state"])
def test_a_prompt_falls_back_to_the_deepest_position_that_has_pages_and_state(
    what: str, while_fetching: bool, is_shared: bool
) -> None:
    engine = engine_with_states(is_shared=is_shared)
    lost = {
        "first part": key_of_state(engine, 36, 0),
        "last part": key_of_state(engine, 36, STATE_PARTS - 1),
        "page": engine.store_keys(CHAT)[6],
        "page after a state": engine.store_keys(CHAT)[4],
    }[what]
    if while_fetching:
        engine.finishes_copies = False
        request = engine.add(CHAT)
        for _ in range(1 + is_shared):
            engine.turn()
            assert (request.phase, len(engine.store.in_flight)) == (Phase.LOADING, 1)
            if engine.store.in_flight[0].is_look_up:
                engine.store.finish()
        lose(engine, lost)
    else:
        lose(engine, lost)
        request = engine.add(CHAT)
    finish(engine)
    assert sources(request)[:2] == (16, 16)
    assert engine.host_tier.disk.n_lookups == (1 + while_fetching if is_shared else 0)


def test_a_prompt_whose_states_are_all_lost_while_they_are_fetched_is_computed() -> None:
    engine = engine_with_states(is_shared=True)
    engine.finishes_copies = False
    request = engine.add(CHAT)
    for n_tokens in (36, 16):
        engine.turn()
        engine.store.finish()
        engine.turn()
        lose(engine, key_of_state(engine, n_tokens, 1))
        engine.store.finish()
    finish(engine)
    assert sources(request) == (0, 0, 0)


def test_a_state_that_another_server_has_written_is_looked_up_though_its_pages_are_known() -> None:
    engine = engine_with_states(is_shared=True, knows_all=True)
    engine.store.unknown = {key_of_state(engine, 36, part) for part in range(STATE_PARTS)}
    request = engine.add(CHAT)
    finish(engine)
    assert sources(request) == (36, 36, 36)
    assert engine.host_tier.disk.n_lookups == 1


def test_nothing_is_looked_up_behind_the_last_possible_state() -> None:
    engine = engine_with_states(is_shared=True, knows_all=True)
    request = engine.add([*CHAT[:37], 1, 2])
    finish(engine)
    assert sources(request) == (36, 36, 36)
    assert engine.host_tier.disk.n_lookups == 0


def test_requests_with_the_same_pages_write_them_once() -> None:
    engine = Engine(n_pages=64, page_size=4, n_slots=64, has_disk=True, finishes_copies=False)
    for last in ([1], [2, 3, 4, 5], [2, 3, 4, 5, 6, 7, 8, 9]):
        engine.add([*prompt(40), *last], max_tokens=1)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.turn()
            engine.copier.finish_all()
        for _ in range(3):
            engine.copier.finish_all()
            engine.scheduler.schedule()
    keys = [key for transfer in engine.store.in_flight for key in transfer.keys]
    assert len(keys) == len(set(keys)) == 12
    assert len(engine.store.in_flight) == 3
    engine.store.finish()
    finish(engine)
    assert engine.store.counts.n_written == 12


def test_a_loading_request_says_what_it_waits_for() -> None:
    engine = restarted_engine(finishes_copies=False)
    engine.store.is_shared = True
    engine.store.make_unknown(0)
    request, other = engine.add(prompt(40)), engine.add(prompt(40))
    stages = []
    for _ in range(12):
        engine.turn()
        awaited = engine.scheduler.tiers.awaited
        if request.phase is Phase.LOADING:
            stages.append((awaited(request).stage, awaited(request).tier, awaited(request).n_pages))
            joined = awaited(other, are_counted=False)
            assert (joined.stage, joined.tier) == stages[-1][:2]
        engine.store.finish()
        engine.copier.finish_all()
        if stages[-1][0] == "copy" and request.phase is Phase.LOADING:
            engine.scheduler.tiers.advance()
            stages.append((awaited(request).stage, awaited(request).tier, awaited(request).n_pages))
    assert list(dict.fromkeys(stages)) == [
        ("lookup", "storage", 0),
        ("fetch", "storage", 10),
        ("copy", "host", 10),
        ("copied", None, 0),
    ]
    finish(engine)


def test_a_store_that_hangs_has_a_bounded_number_of_writes_to_wait_for() -> None:
    engine = restarted_engine(finishes_copies=False)
    disk = engine.host_tier.disk
    engine.store.pages.clear()
    request = engine.add(prompt(40))
    while request.phase is not Phase.FINISHED:
        engine.turn()
        engine.copier.finish_all()
    for _ in range(200):
        disk.offer(Namespace(), token_bytes(prompt(40)))
        disk.advance()
    assert sum(len(transfer.keys) for transfer in engine.store.in_flight) == 10
    assert len(disk._stores) < disk._max_in_store
    assert disk.n_offers > 100
    engine.store_all()
    assert not disk._stores
