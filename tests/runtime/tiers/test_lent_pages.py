"""Requests whose pages the device copies where a store has them, with a fake device, copier and store."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tiers.host_tier import HostLoad, HostTier
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.tree.changes import StoredPages
from radixkv.tree.node import Namespace
from support import fake_store
from support.engine import Engine, prompt, token_bytes
from support.evicting import evict_all
from support.fake_store import N_LOANS_A_REFUSAL, FakeStore


def restarted_engine(n_tokens: int = 40, **settings: object) -> Engine:
    """Returns an engine whose store has a prompt that neither device nor host tier has."""
    engine = Engine(**{"n_pages": 32, "page_size": 4, "n_slots": 60, "has_disk": True, "lends": True, **settings})
    engine.serve(prompt(n_tokens), max_tokens=1)
    engine.store_all()
    evict_all(engine.cache, engine.host)
    engine.check_invariants()
    return engine


def begun(engine: Engine, n_tokens: int = 40) -> Request:
    """Adds a request, whose pages are being copied."""
    engine.finishes_copies = False
    request = engine.add(prompt(n_tokens))
    engine.turn()
    return request


def finish(engine: Engine) -> None:
    engine.finishes_copies = True
    engine.run_to_the_end()
    engine.check_outputs()
    assert not engine.lender.lent.total()


def sources(request: Request) -> tuple[int, int, int, int]:
    counted = request.cache_use.counted
    return counted.n_cached, counted.n_loaded, counted.n_fetched, counted.n_shared


def test_pages_are_copied_without_a_host_slot() -> None:
    engine = restarted_engine()
    n_free = engine.host.n_free
    request = begun(engine)
    assert request.phase is Phase.LOADING
    assert not engine.store.in_flight
    (load,) = engine.copier.in_flight
    assert min(load.slots) >= engine.copier.n_slots
    assert (len(load.pages), engine.lender.lent.total(), engine.host.n_free) == (10, 10, n_free)
    awaited = engine.scheduler.tiers.awaited(request)
    assert (awaited.stage, awaited.tier, awaited.first, awaited.n_pages) == ("copy", "storage", 0, 10)
    assert awaited.slots == ()
    joined = engine.add(prompt(24))
    engine.turn()
    awaited = engine.scheduler.tiers.awaited(joined)
    assert (awaited.stage, awaited.tier, awaited.first, awaited.n_pages) == ("copy", "storage", 0, 6)
    assert awaited.slots == ()
    finish(engine)
    assert sources(request) == (39, 39, 39, 39)
    disk, _ = engine.host_tier.disk.stats()
    assert disk.pages_fetched_total == 10
    assert disk.fetch_seconds > 0


def test_lent_pages_are_in_events_as_fetched_ones_are() -> None:
    """Another server may have stored them, so that this one knows their tokens only now."""
    engine = restarted_engine()
    *_, storage = engine.scheduler.tiers.changes()
    begun(engine)
    finish(engine)
    stored = [change for change in storage.changes.take() if isinstance(change, StoredPages)]
    assert b"".join(change.tokens for change in stored).startswith(token_bytes(prompt(40)))


def test_what_the_host_tier_has_comes_from_there_in_the_same_copy() -> None:
    engine = restarted_engine()
    longer = engine.serve(prompt(64), max_tokens=1)
    engine.store_all()
    assert longer.cache_use.counted.n_fetched == 40
    evict_all(engine.cache)
    host = engine.host.open(Namespace(), token_bytes(prompt(64)))
    engine.host.close(host)
    evict_all(engine.cache, engine.host)
    again = engine.serve(prompt(20), max_tokens=1)
    assert again.cache_use.counted.n_fetched == 19
    engine.store_all()
    evict_all(engine.cache)
    request = begun(engine, 64)
    (load,) = engine.copier.in_flight
    are_lent = [slot >= engine.copier.n_slots for slot in load.slots]
    assert are_lent == sorted(are_lent)
    assert (are_lent.count(False), are_lent.count(True)) == (5, 11)
    finish(engine)
    assert sources(request) == (63, 63, 43, 43)


def test_a_loan_that_is_refused_is_a_fetch() -> None:
    engine = restarted_engine()
    engine.lender.n_loans = N_LOANS_A_REFUSAL - 1
    request = begun(engine)
    assert engine.store.in_flight
    finish(engine)
    assert sources(request)[:3] == (39, 39, 39)


def test_a_copy_that_fails_is_computed_and_given_back() -> None:
    engine = restarted_engine()
    request = begun(engine)
    engine.copier.finish(fails=True)
    finish(engine)
    assert sources(request) == (0, 0, 0, 0)


def test_an_abort_during_a_copy_gives_the_pages_back_when_it_has_ended() -> None:
    engine = restarted_engine()
    request = begun(engine)
    engine.abort(request)
    engine.turn()
    assert engine.lender.lent.total() == 10, "the copy reads them"
    finish(engine)


@pytest.mark.parametrize("n_dropped", [0, 16, 40, 60])
def test_an_invalidation_during_a_copy_drops_its_pages(n_dropped: int) -> None:
    engine = restarted_engine()
    request = begun(engine)
    engine.invalidate(Namespace(), token_bytes(prompt(n_dropped)))
    finish(engine)
    assert sources(request) == (0, 0, 0, 0), "those before a longer prompt are removed, too"
    again = engine.serve(prompt(40))
    assert again.cache_use.counted.n_cached == 39


def test_an_invalidation_of_another_prompt_drops_nothing() -> None:
    engine = restarted_engine()
    request = begun(engine)
    engine.invalidate(Namespace(), token_bytes(prompt(16, first=2)))
    finish(engine)
    assert sources(request) == (39, 39, 39, 39)


def test_a_flush_during_a_copy() -> None:
    engine = restarted_engine()
    begun(engine)
    engine.host_tier.flush()
    engine.cache.flush()
    again = engine.add(prompt(40))
    finish(engine)
    assert again.cache_use.counted.n_loaded == 0


def test_nothing_is_lent_to_a_request_without_room() -> None:
    """The lease on the pages that the device has leaves too few for the others."""
    engine = restarted_engine(100, n_pages=40, num_reserved_decode_tokens=0)
    engine.serve(prompt(60), max_tokens=1)
    engine.store_all()
    evict_all(engine.host)
    n_loans = engine.lender.n_loans
    begin_load, loads = HostTier.begin_load, list[tuple[bool, int]]()

    def noted(tier: HostTier, *args: Any, **options: Any) -> HostLoad | None:
        load = begin_load(tier, *args, **options)
        if options.get("n_lendable"):
            loads.append((load is not None, engine.lender.n_loans - n_loans))
        return load

    engine.add(prompt(80, first=2), max_tokens=30)
    engine.turn(2)
    waiting = engine.add(prompt(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTier, "begin_load", noted)
        engine.turn(3)
    assert (False, 0) in loads, "it has room"
    assert not engine.lender.lent.total()
    finish(engine)
    assert waiting.cache_use.counted.n_cached == 99


def test_a_prompt_with_more_pages_than_can_be_lent_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find that out takes two looks at the store, however long the prompt is."""
    monkeypatch.setattr(fake_store, "MAX_LENT_PAGES", 9)
    engine = restarted_engine()
    n_loans, run, asked = engine.lender.n_loans, FakeStore.run, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStore, "run", lambda store, keys: asked.append(len(keys)) or run(store, keys))
        assert not engine.host_tier.n_lendable(
            Namespace(), token_bytes(prompt(40)), engine.host_tier.match(Namespace(), token_bytes(prompt(40)))
        )
    assert sum(asked) == 1
    request = begun(engine)
    finish(engine)
    assert (sources(request), engine.lender.n_loans) == ((39, 39, 39, 0), n_loans)


@pytest.mark.parametrize("lost", [0, 1])
def test_pages_are_lent_unless_another_store_has_more(lost: int) -> None:
    engine = restarted_engine(n_more_stores=1)
    keys = engine.store_keys(prompt(40))
    del engine.stores[lost].pages[keys[7]]
    request = begun(engine)
    assert (engine.lender.lent.total() > 0) == (lost == 0)
    finish(engine)
    assert sources(request)[:3] == (39, 39, 39)


def test_a_policy_of_never_lends_nothing() -> None:
    engine = restarted_engine(load_policy="never")
    request = begun(engine)
    finish(engine)
    assert (sources(request), engine.lender.n_loans) == ((0, 0, 0, 0), 0)


@pytest.mark.parametrize(("load_s", "is_loaded"), [(0.001, True), (1.0, False)])
def test_an_explanation_prices_a_copy_in_place(load_s: float, is_loaded: bool) -> None:
    """A fetch through the host tier would take longer than computing."""
    engine = restarted_engine()
    choice = engine.host_tier.choice
    choice.policy = "auto"
    choice.cost.add_step(1000, 1000, 100.0)
    choice.cost.add_load(1000, 1000 * load_s)
    choice.cost.fetch_rate(0).add(1000, 500.0)
    hits = engine.scheduler.tiers.find(Namespace(), token_bytes(prompt(40)))
    request = begun(engine)
    finish(engine)
    assert sources(request)[2] == (39 if is_loaded else 0)
    assert (hits.n_on_disk, hits.n_fetched, hits.is_fetched) == (39, sources(request)[2], is_loaded)


def test_an_explanation_has_the_pages_that_come_beside_those_in_place() -> None:
    engine = restarted_engine(n_more_stores=1)
    engine.serve(prompt(20), max_tokens=1)
    engine.store_all()
    evict_all(engine.cache)
    hits = engine.scheduler.tiers.find(Namespace(), token_bytes(prompt(40)))
    assert (hits.n_in_host, hits.is_loaded, hits.n_fetched, hits.is_fetched) == (20, True, 19, True)
    assert hits.n_from_shared == 20
    request = begun(engine)
    finish(engine)
    assert sources(request) == (39, 39, 19, 19)


def test_an_explanation_loads_with_pages_in_place_what_alone_is_computed_sooner() -> None:
    """A load has a fixed time of 1 ms, and each token that is not computed saves a thirtieth of that."""
    engine = restarted_engine()
    engine.serve(prompt(20), max_tokens=1)
    engine.store_all()
    evict_all(engine.cache)
    choice = engine.host_tier.choice
    choice.policy, choice.cost = "auto", LoadCost()
    choice.cost.add_load(1000, 1.0)
    choice.cost.add_step(1000, 1000, 1.0 + 1 / 30)
    find = engine.scheduler.tiers.find
    alone, both = (find(Namespace(), token_bytes(prompt(n_tokens))) for n_tokens in (20, 40))
    assert (alone.n_in_host, alone.is_loaded) == (19, False)
    assert (both.n_in_host, both.is_loaded, both.is_fetched) == (20, True, True)
    request = begun(engine)
    finish(engine)
    assert sources(request)[:3] == (39, 39, 19)
