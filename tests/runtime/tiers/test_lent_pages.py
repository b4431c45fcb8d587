"""Requests whose pages the device copies where a store has them, with a fake device, copier and store."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Phase, Request
from radixkv.tree.changes import StoredPages
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt, token_bytes
from support.evicting import evict_all
from support.fake_store import N_LOANS_A_REFUSAL


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
    assert not engine.store.lent.total()


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
    assert (len(load.pages), engine.store.lent.total(), engine.host.n_free) == (10, 10, n_free)
    awaited = engine.scheduler.tiers.awaited(request)
    assert (awaited.tier, awaited.first, awaited.n_pages, awaited.slots) == ("storage", 0, 10, ())
    joined = engine.add(prompt(24))
    engine.turn()
    awaited = engine.scheduler.tiers.awaited(joined)
    assert (awaited.tier, awaited.first, awaited.n_pages, awaited.slots) == ("storage", 0, 6, ())
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
    engine.store.n_loans = N_LOANS_A_REFUSAL - 1
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
    assert engine.store.lent.total() == 10, "the copy reads them"
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


def test_a_request_without_room_gives_the_pages_back() -> None:
    engine = restarted_engine(n_pages=14)
    engine.finishes_copies = False
    other = engine.add(prompt(30, first=2), max_tokens=20)
    engine.turn()
    waiting = engine.add(prompt(40))
    for _ in range(3):
        engine.turn()
    assert not engine.store.lent.total()
    finish(engine)
    assert waiting.cache_use.counted.n_cached == 39
    assert other.cache_use.counted.n_cached == 0


def test_a_policy_of_never_lends_nothing() -> None:
    engine = restarted_engine(load_policy="never")
    request = begun(engine)
    finish(engine)
    assert (sources(request), engine.store.n_loans) == ((0, 0, 0, 0), 0)
