"""What counts as a hit in each tier, for the eviction policies that count hits."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt, token_bytes

PAGE_SIZE = 4


def hits(cache: PageCache, n_tokens: int) -> int:
    """Returns the hits of the page that ends the first ``n_tokens`` of the prompt."""
    lease = cache.tree.lease(Namespace(), token_bytes(prompt(n_tokens)), is_use=False)
    assert lease.n_tokens == n_tokens
    n_hits = lease.node.n_hits
    cache.tree.release(lease)
    return n_hits


def answer(engine: Engine, n_tokens: int, max_tokens: int) -> None:
    engine.serve(prompt(n_tokens), max_tokens)
    engine.turn(4)


def test_a_store_is_no_hit_and_a_load_is_one() -> None:
    engine = Engine(200, PAGE_SIZE, n_slots=300, eviction_policy="lfuda")
    answer(engine, 40, 600)  # long enough that its pages are stored in several copies
    assert (hits(engine.cache, 40), hits(engine.host, 40)) == (0, 0)
    answer(engine, 60, 1)  # finds ten pages on the device
    assert (hits(engine.cache, 40), hits(engine.host, 40)) == (1, 0)
    assert (hits(engine.cache, 60), hits(engine.host, 60)) == (0, 0)
    engine.cache.flush()
    answer(engine, 60, 1)  # finds them in the host tier
    assert engine.host_tier.counters.n_pages_loaded == 60 // PAGE_SIZE
    assert (hits(engine.host, 40), hits(engine.host, 56)) == (1, 1)


def test_a_request_that_waits_for_pages_counts_a_hit_only_when_it_starts() -> None:
    engine = Engine(16, PAGE_SIZE, n_slots=300, eviction_policy="lfuda")
    answer(engine, 40, 1)
    engine.cache.flush()
    answer(engine, 20, 1)  # so five of the prompt's ten pages are on the device again
    assert (hits(engine.cache, 20), hits(engine.host, 20)) == (0, 1)
    taken = engine.cache.open(Namespace(), b"", bypasses_tree=True)
    assert engine.cache.reserve(taken, 8)
    engine.add(prompt(44), max_tokens=1)
    for _ in range(3):  # eight pages are available, and six are missing; but five of the eight are the prompt's own
        assert engine.scheduler.schedule() is None
    assert (hits(engine.cache, 20), hits(engine.host, 20)) == (0, 1)
    engine.cache.close(taken)
    engine.run()
    assert (hits(engine.cache, 20), hits(engine.host, 20)) == (1, 2)


def test_a_fetch_and_the_load_after_it_are_one_hit() -> None:
    engine = Engine(64, PAGE_SIZE, n_slots=64, has_disk=True, eviction_policy="lfuda")
    answer(engine, 40, 1)
    for n_tokens in (40, 20):
        for cache in (engine.cache, engine.host):
            cache.flush()
        answer(engine, n_tokens, 1)
    engine.cache.flush()
    n_fetched = engine.host_tier.disk.counters.n_pages_loaded
    assert (hits(engine.host, 20), n_fetched) == (1, 15)
    answer(engine, 40, 1)
    assert engine.host_tier.disk.counters.n_pages_loaded == n_fetched + 5
    assert (hits(engine.host, 20), hits(engine.host, 40)) == (2, 1)
