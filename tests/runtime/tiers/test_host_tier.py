"""Requests whose pages are in the host tier, with a fake device and a fake copier."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tiers import host_tier, tier_link
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt, token_bytes
from support.evicting import evict_all


def small_engine(**settings: Any) -> Engine:
    """Returns an engine whose pool holds one long request, and whose host tier holds many."""
    return Engine(**{"n_pages": 16, "page_size": 4, "n_slots": 200, **settings})


def serve(engine: Engine, n_tokens: int = 40, first: int = 1, **options: Any) -> Request:
    return engine.serve(prompt(n_tokens, first), **options)


def test_an_evicted_prompt_is_loaded() -> None:
    engine = small_engine()
    first = serve(engine)
    serve(engine, first=2)
    again = serve(engine)
    engine.run_to_the_end()
    assert first.cache_use.counted.n_cached == 0
    assert again.cache_use.counted.n_cached == 39
    assert again.cache_use.counted.n_loaded == 19, (
        "half of the prompt was evicted from the device, and its last token is computed"
    )


def test_a_longer_prompt_loads_what_the_tier_has_and_computes_the_rest() -> None:
    engine = small_engine()
    serve(engine, 20)
    serve(engine, 48, first=2)
    longer = serve(engine, 44)
    engine.run_to_the_end()
    assert (longer.cache_use.counted.n_cached, longer.cache_use.counted.n_loaded) == (20, 8)


def test_nothing_is_loaded_without_need() -> None:
    engine = small_engine()
    serve(engine)
    again = serve(engine)
    engine.run_to_the_end()
    assert (again.cache_use.counted.n_cached, again.cache_use.counted.n_loaded) == (39, 0)
    assert engine.host_tier.counters.n_pages_loaded == 0


@pytest.mark.parametrize("n_tokens", [12, 24, 40])
def test_an_invalidation_during_a_load_makes_the_request_compute_and_store(n_tokens: int) -> None:
    engine = small_engine(n_pages=32, finishes_copies=False)
    serve_and_store(engine)
    request = engine.add(prompt(40))
    engine.turn()
    assert request.phase is Phase.LOADING
    dropped = engine.invalidate(Namespace(), token_bytes(prompt(n_tokens)))
    assert (dropped.n_on_device, dropped.n_in_host) == (0, 10)
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert (request.cache_use.counted.n_cached, request.cache_use.counted.n_loaded) == (0, 0)
    assert engine.host.tree.match(Namespace(), token_bytes(prompt(40))) == 40


def test_a_loaded_request_that_gets_no_row_times_out() -> None:
    engine = small_engine(n_pages=32, max_num_seqs=1, queue_timeout_s=5.0, finishes_copies=False)
    serve_and_store(engine)
    request = engine.add(prompt(40))
    engine.turn()
    engine.add(prompt(4, first=9), max_tokens=30)
    engine.turn()
    engine.now += 6.0
    engine.expire()
    assert request.phase is Phase.LOADING, "its pages are being loaded"
    engine.finishes_copies = True
    engine.turn(2)
    engine.expire()
    assert engine.ended[request.id].reason == "queue_timeout"
    engine.run_to_the_end()
    assert engine.cache.tree.match(Namespace(), token_bytes(prompt(40))) == 40, "what was loaded stays cached"


def test_a_request_waits_no_longer_for_pages_that_were_promised_to_one_that_timed_out() -> None:
    """The loaded pages stay leased by a running request, so that none becomes available."""
    tenants = [TenantConfig("capped", max_row_share=0.13), TenantConfig("other")]
    engine = small_engine(
        n_pages=28, tenants=tenants, max_num_seqs=8, max_num_batched_tokens=64, queue_timeout_s=5.0
    )
    capped: dict[str, Any] = {"namespace": Namespace("capped"), "tenant": "capped"}
    engine.serve(prompt(20), **capped)
    engine.turn(3)
    engine.cache.flush()
    engine.finishes_copies = False
    loaded = engine.add(prompt(60), **capped)
    engine.turn()
    engine.add(prompt(20), uses_tiers=False, max_tokens=40, **capped)
    engine.turn(2)
    engine.finishes_copies = True
    engine.turn(3)
    engine.now += 1.0
    waiting = engine.add(
        prompt(64, 7), namespace=Namespace("other"), tenant="other", max_tokens=2, uses_tiers=False
    )
    engine.turn(3)
    assert (loaded.phase, waiting.phase) == (Phase.LOADING, Phase.WAITING)
    engine.now += 4.5
    engine.expire()
    assert engine.ended[loaded.id].reason == "queue_timeout"
    engine.turn()
    assert waiting.phase is Phase.RUNNING


def test_pages_are_stored_once() -> None:
    engine = small_engine(n_pages=64)
    for _ in range(3):
        for n_tokens in (40, 44, 30):
            serve(engine, n_tokens)
    engine.run_to_the_end()
    assert engine.host_tier.counters.n_pages_stored == engine.host.tree.n_pages_reachable


def test_a_prefix_that_a_batch_shares_is_stored_once() -> None:
    engine = small_engine(n_pages=64, finishes_copies=False)
    for last in range(6):
        engine.add([*prompt(32), last])
    engine.turn(20)
    assert len(engine.copier.in_flight) == 1
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert engine.host_tier.counters.n_pages_stored == engine.host.tree.n_pages_reachable


@pytest.mark.nightly
def test_a_running_request_is_stored_while_it_decodes() -> None:
    engine = small_engine(n_pages=200, max_num_batched_tokens=64)
    request = engine.add(prompt(10), max_tokens=600)
    while request.n_known < 400:
        engine.turn()
    assert engine.host.tree.n_pages_reachable * 4 >= 256
    engine.run_to_the_end()


def test_the_request_waits_without_a_batch_slot_while_others_run() -> None:
    engine = small_engine(n_pages=32, finishes_copies=False)
    serve_and_store(engine)
    other = engine.add(prompt(8, first=5), max_tokens=30)
    engine.turn()
    engine.now = 1.0
    request = engine.add(prompt(40))
    engine.turn(5)
    assert request.phase is Phase.LOADING
    assert request.batch_slot == -1
    assert len(engine.output(other)) > 3
    engine.copier.finish()
    engine.now = 3.0
    engine.turn()
    assert request.phase is Phase.RUNNING
    assert engine.scheduler.tiers.ended([request]) == (1.0, 3.0)
    assert engine.scheduler.tiers.ended([other]) is None
    engine.finishes_copies = True
    engine.run_to_the_end()


def serve_and_store(engine: Engine) -> None:
    """Serves a prompt of 40 tokens, stores it, and evicts it from the device."""
    engine.add(prompt(40))
    for _ in range(10):
        engine.turn()
        engine.copier.finish_all()
    engine.scheduler.schedule()
    assert engine.scheduler.is_idle
    evict_all(engine.cache)


def test_a_second_request_joins_the_load() -> None:
    engine = small_engine(n_pages=40, finishes_copies=False)
    serve_and_store(engine)
    first, second = engine.add(prompt(40)), engine.add([*prompt(36), 1, 2, 3])
    engine.turn()
    assert (first.phase, second.phase) == (Phase.LOADING, Phase.LOADING)
    assert len(engine.copier.in_flight) == 1
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert engine.host_tier.counters.n_pages_loaded == 10, "each page once"
    assert (first.cache_use.counted.n_cached, second.cache_use.counted.n_cached) == (39, 36)


@pytest.mark.parametrize("is_joined", [False, True])
def test_an_abort_leaves_the_load_and_its_pages_stay_cached(is_joined: bool) -> None:
    engine = small_engine(n_pages=40, finishes_copies=False)
    serve_and_store(engine)
    first = engine.add(prompt(40))
    second = engine.add(prompt(40)) if is_joined else None
    engine.turn()
    engine.abort(first)
    engine.finishes_copies = True
    engine.turn()
    engine.run_to_the_end()
    third = serve(engine)
    assert (third.cache_use.counted.n_cached, third.cache_use.counted.n_loaded) == (39, 0)
    assert second is None or second.cache_use.counted.n_cached == 39


def test_a_flush_during_a_load_drops_what_was_loaded() -> None:
    engine = small_engine(n_pages=40, finishes_copies=False)
    serve_and_store(engine)
    request = engine.add(prompt(40))
    engine.turn()
    engine.cache.flush()
    engine.host_tier.flush()
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert (request.cache_use.counted.n_cached, request.cache_use.counted.n_loaded) == (0, 0)


def test_a_failed_load_is_computed() -> None:
    engine = small_engine(n_pages=40, finishes_copies=False)
    serve_and_store(engine)
    request = engine.add(prompt(40))
    engine.turn()
    engine.copier.finish(fails=True)
    engine.finishes_copies = True
    engine.run_to_the_end()
    assert (request.cache_use.counted.n_cached, request.cache_use.counted.n_loaded) == (0, 0)
    assert engine.host_tier.counters.n_failed == 1


def test_a_failed_store_is_a_miss_later() -> None:
    engine = small_engine(finishes_copies=False)
    engine.add(prompt(40))
    for _ in range(8):
        engine.turn()
        engine.copier.finish(fails=True)
    engine.finishes_copies = True
    serve(engine, 40, first=2)
    again = serve(engine)
    engine.run_to_the_end()
    assert again.cache_use.counted.n_loaded == 0


def test_a_preempted_request_loads_what_it_had_computed() -> None:
    engine = small_engine(n_pages=40, max_num_seqs=2)
    first = engine.add(prompt(60), max_tokens=60)
    second = engine.add(prompt(60, first=2), max_tokens=60)
    engine.run_to_the_end()
    assert engine.scheduler.n_preemptions > 0
    n_computed = engine.n_computed
    n_needed = sum(request.n_known - 1 for request in (first, second))
    assert n_computed < n_needed + 20, "a preempted request was computed again"


def test_tokens_that_are_loaded_again_after_a_preemption_count_once() -> None:
    engine = small_engine(n_pages=32, max_num_batched_tokens=8)
    serve(engine)
    evict_all(engine.cache)
    engine.check_invariants()
    request = engine.add(prompt(60), max_tokens=1)
    while request.n_scheduled < 48:
        engine.turn()
    while engine.pending:
        engine.collect()
    engine.scheduler.running.preempt(request)
    engine.scheduler.running.release()
    for _ in range(4):  # the stores of what it has computed
        engine.finish_copies()
        engine.host_tier.advance()
    evict_all(engine.cache)
    engine.check_invariants()
    engine.run_to_the_end()
    assert engine.host_tier.counters.n_pages_loaded > 10, "it was not loaded again"
    assert (request.cache_use.counted.n_cached, request.cache_use.counted.n_loaded) == (40, 40)


@pytest.mark.parametrize(
    ("load_policy", "step_s", "n_loaded"),
    [("always", 100, 19), ("never", 1, 0), ("auto", 100, 19), ("auto", 0.1, 0)],
)
def test_load_policies(load_policy: str, step_s: float, n_loaded: int) -> None:
    """The fake copier takes 0.25 s for each copy, some 6 ms a token."""
    engine = small_engine(load_policy=load_policy)
    serve(engine)
    serve(engine, first=2)
    engine.host_tier.choice.cost.add_step(1000, 1000, step_s)
    again = serve(engine)
    engine.run_to_the_end()
    assert again.cache_use.counted.n_loaded == n_loaded
    assert engine.host_tier.choice.n_declined == Counter({"load": 1} if not n_loaded else {})


def test_selective_stores_what_a_second_request_has_used() -> None:
    engine = small_engine(n_pages=64, write_policy="selective")
    serve(engine, 24)
    assert engine.host.tree.n_pages_reachable == 0
    serve(engine, 40)
    assert engine.host.tree.n_pages_reachable == 6, "only the prefix of the first request was used twice"
    engine.run_to_the_end()


@pytest.mark.parametrize(
    "options", [{"reads_cache": False}, {"n_prompt_logprobs": 1}], ids=lambda one: next(iter(one))
)
def test_requests_that_must_not_read_the_cache_touch_no_tier(options: dict[str, Any]) -> None:
    engine = small_engine()
    serve(engine, **options)
    assert engine.host.tree.n_pages_reachable == 0
    serve(engine)
    serve(engine, first=2)
    again = serve(engine, **options)
    engine.run_to_the_end()
    assert again.cache_use.counted.n_loaded == 0


def test_the_next_choice_of_such_a_request_loads_nothing_either() -> None:
    engine = small_engine()
    serve(engine)
    serve(engine, first=2)
    leader = engine.add(prompt(40, 1), n=2, n_prompt_logprobs=1)
    (follower,) = leader.followers
    engine.abort(leader)
    engine.run_to_the_end()
    assert follower.cache_use.counted.n_loaded == 0


def test_the_tier_evicts_what_was_used_least_recently() -> None:
    engine = small_engine(n_slots=24)
    for first in (1, 2, 1, 3):
        serve(engine, first=first)
    kept, lost = serve(engine), serve(engine, first=2)
    engine.run_to_the_end()
    assert engine.host.n_evicted > 0
    assert kept.cache_use.counted.n_cached == 39
    assert lost.cache_use.counted.n_cached < 39


@pytest.mark.parametrize("write_policy", ["through", "selective"])
@pytest.mark.parametrize(("n_prompt", "n_answer"), [(80, 1), (8, 72), (40, 40)])
def test_the_leading_pages_of_what_is_larger_than_the_tier_are_stored(
    write_policy: str, n_prompt: int, n_answer: int
) -> None:
    engine = Engine(n_pages=32, page_size=4, n_slots=7, write_policy=write_policy, max_num_batched_tokens=200)
    first = engine.serve(prompt(n_prompt), max_tokens=n_answer)
    engine.store_all()
    whole = [*prompt(n_prompt), *engine.output(first)]
    if write_policy == "selective":
        assert engine.n_in_host(whole) == 0
        engine.serve(whole, max_tokens=1)
        engine.store_all()
    assert engine.n_in_host(whole) == 7 * 4
    evict_all(engine.cache)
    again = engine.add(whole, max_tokens=1)
    engine.run_to_the_end()
    assert again.cache_use.counted.n_loaded == 7 * 4


def test_pages_that_are_in_use_leave_room_for_the_leading_ones_of_others() -> None:
    engine = Engine(n_pages=64, page_size=4, n_slots=10, max_num_batched_tokens=200)
    serve(engine, 16)
    engine.store_all()
    held = engine.host.open(Namespace(), token_bytes(prompt(16)))  # as a copy in flight holds its slots
    serve(engine, 40, first=2)
    engine.store_all()
    assert engine.n_in_host(prompt(40, 2)) == 6 * 4
    assert engine.n_in_host(prompt(16)) == 16
    engine.host.close(held)
    serve(engine, 44, first=2)
    engine.store_all()
    assert engine.n_in_host(prompt(44, 2)) == 10 * 4
    engine.run_to_the_end()


def test_a_tenant_stores_the_leading_pages_within_its_share_of_the_tier() -> None:
    tenants = [TenantConfig("capped", max_page_share=0.25), TenantConfig("other")]
    engine = Engine(n_pages=80, page_size=4, n_slots=20, tenants=tenants, max_num_batched_tokens=200)
    engine.serve(prompt(40), tenant="capped", namespace=Namespace(tenant="capped"), max_tokens=1)
    engine.store_all()
    assert engine.n_in_host(prompt(40), Namespace(tenant="capped")) == 5 * 4
    engine.serve(prompt(40), tenant="other", namespace=Namespace(tenant="other"), max_tokens=1)
    engine.store_all()
    assert engine.n_in_host(prompt(40), Namespace(tenant="other")) == 40
    engine.run_to_the_end()


def test_loading_requests_yield_to_the_running_one() -> None:
    engine = small_engine(n_pages=24, finishes_copies=False)
    serve_and_store(engine)
    running = engine.add(prompt(20, first=4), max_tokens=70)
    engine.turn()
    engine.add(prompt(40))
    for turn in range(300):
        engine.turn()
        if turn % 3 == 0:
            engine.copier.finish()
    assert len(engine.output(running)) == 70
    engine.finishes_copies = True
    engine.run_to_the_end()


def test_no_more_pages_are_promised_than_there_are() -> None:
    """The cached prefix of a request cannot be evicted for it."""
    engine = Engine(n_pages=10, page_size=4, n_slots=200, finishes_copies=False)
    engine.add(prompt(24), max_tokens=1)
    for _ in range(20):
        engine.turn()
        engine.copier.finish_all()
    blocks = engine.cache.open(Namespace(), b"", bypasses_tree=True)
    assert engine.cache.reserve(blocks, engine.cache.n_free + 1), "the last page of the prompt is evicted"
    engine.cache.close(blocks)
    engine.add(prompt(11, first=2), max_tokens=20)
    engine.turn()
    engine.add(prompt(39), max_tokens=1)
    engine.turn()
    assert engine.scheduler.tiers.n_promised <= engine.cache.n_available
    engine.finishes_copies = True
    engine.run_to_the_end()


def growing_engine(n_ready: int = 0, **settings: Any) -> Engine:
    """Returns an engine whose host memory is being pinned, and of which some slots are ready."""
    engine = small_engine(**settings)
    engine.copier.is_growing, engine.copier.n_ready = True, n_ready
    return engine


def test_offers_are_bounded_while_host_memory_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_link, "MAX_OFFERS", 8)
    engine = growing_engine()
    for first in range(20):
        serve(engine, first=first)
    engine.run_to_the_end()
    assert engine.host_tier.n_offers == 8


@pytest.mark.parametrize(("n_states", "n_ready"), [(None, 0), (None, 5), (8, 0), (8, 2)])
def test_no_offer_waits_once_host_memory_has_ended(n_states: int | None, n_ready: int) -> None:
    """Its memory may end before the first slot: states have the beginning of it."""
    engine = growing_engine(n_ready, n_states=n_states)
    serve(engine)
    stored: list[bytes] = []
    engine.host_tier.offer(Namespace(), token_bytes(prompt(40)), lambda _, tokens: stored.append(tokens))
    engine.turn()
    assert engine.host_tier.n_offers, "there may be more slots"
    engine.copier.is_growing = False
    engine.turn(2)
    assert engine.host_tier.n_offers == 0
    assert stored == [token_bytes(prompt(40))]
    serve(engine, first=2)
    engine.turn()
    assert engine.host_tier.n_offers == 0
    engine.run_to_the_end()
    assert engine.host.tree.n_pages_reachable == (n_ready if n_states is None else 0)


def test_close_does_not_wait_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = growing_engine(has_disk=True)
    serve(engine)
    engine.scheduler.schedule()
    assert engine.host_tier.n_offers
    monkeypatch.setattr(engine.store, "close", lambda timeout_s: None)
    looks = iter(range(100))
    monkeypatch.setattr(host_tier, "monotonic", lambda: next(looks) * 1e-6)
    engine.host_tier.close(timeout_s=60.0)
    assert engine.copier.n_closed == 1


def test_a_request_whose_load_began_as_it_tried_to_overtake_waits_for_it() -> None:
    """The prompt of two chunks lets shorter ones overtake, one of which has its pages in the host tier."""
    engine = Engine(n_pages=40, page_size=4, n_slots=200, max_num_batched_tokens=34)
    serve(engine, 16, first=1)
    for first in range(2, 8):
        serve(engine, 40, first=first)
    longer = engine.add(prompt(60, 20))
    loaded = engine.add(prompt(16, 1))
    engine.launch()
    assert loaded.phase is Phase.LOADING
    assert loaded.block_table is None
    engine.run_to_the_end()
    assert longer.cache_use.counted.n_cached == 0
    assert loaded.cache_use.counted.n_loaded > 0


def test_a_fork_that_ends_without_pages_is_forgotten() -> None:
    engine = small_engine(n_pages=32, max_num_seqs=2)
    leader = engine.add(prompt(20), n=3, max_tokens=40)
    while engine.siblings[leader.id][2].phase is not Phase.WAITING:
        engine.turn()
    fork = engine.siblings[leader.id][2]
    assert fork.block_table is None
    engine.abort(fork)
    engine.scheduler.tiers.ended([fork])
    kept = [one for one in vars(engine.scheduler.tiers).values() if isinstance(one, dict)]
    assert not any(fork in one for one in kept)
