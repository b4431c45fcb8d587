"""Requests whose pages are on disk and in a shared store, with fakes that take no time of their own."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Request
from radixkv.runtime.tiers import tier_link
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.tree.node import Namespace
from support.engine import MESSAGE_ENDS, Engine, prompt, token_bytes
from support.evicting import evict_all
from support.fake_copier import STATE_PARTS
from support.fake_store import FakeStore

N_TOKENS = 40


def started_again(**settings: object) -> Engine:
    """Returns an engine with an empty host tier, and a prompt on disk and in a shared store."""
    engine = Engine(n_pages=32, page_size=4, n_slots=60, has_disk=True, n_more_stores=1, **settings)
    engine.stores[1].is_shared = True
    engine.finishes_copies, finishes_copies = True, engine.finishes_copies
    engine.serve(prompt(N_TOKENS), max_tokens=1)
    engine.store_all()
    forget(engine)
    engine.finishes_copies = finishes_copies
    return engine


def forget(engine: Engine) -> None:
    evict_all(engine.cache, engine.host)
    engine.check_invariants()


def keep(store: FakeStore, first: int, last: int) -> None:
    """Leaves the pages ``first .. last - 1`` of the prompt in a store."""
    store.pages = dict(list(store.pages.items())[first:last])


def ask(engine: Engine) -> Request:
    request = engine.add(prompt(N_TOKENS))
    engine.run_to_the_end()
    engine.store_all()
    engine.check_outputs()
    engine.check_invariants()
    return request


def sources(request: Request) -> tuple[int, int]:
    """Returns how many tokens came from the stores, and how many of them from the shared one."""
    use = request.cache_use.counted
    assert use is not None
    return use.n_fetched, use.n_shared


def measure(tier: HostTier, *s_per_token: float) -> None:
    """Makes loads take no time, computing 100 ms a token, and the stores what is given."""
    tier.choice.policy = "auto"
    tier.choice.cost.add_step(1000, 1000, 100.0)
    tier.choice.cost.add_load(1000, 0.001)
    for number, seconds in enumerate(s_per_token):
        tier.choice.cost.fetch_rate(number).forget()
        tier.choice.cost.fetch_rate(number).add(1000, 1000 * seconds)


def pages_read(engine: Engine) -> list[int]:
    disk = engine.host_tier.disk
    assert disk is not None
    return [member.n_pages_read for member in disk.store.members]


def test_what_both_have_comes_from_disk() -> None:
    engine = started_again()
    assert [len(store.pages) for store in engine.stores] == [10, 10]
    assert sources(ask(engine)) == (39, 0)
    assert pages_read(engine) == [10, 0]


@pytest.mark.parametrize(("n_on_disk", "n_shared"), [(0, 39), (5, 19), (9, 3)])
def test_what_the_disk_lacks_comes_from_the_shared_store_and_is_written(n_on_disk: int, n_shared: int) -> None:
    engine = started_again()
    keep(engine.stores[0], 0, n_on_disk)
    assert sources(ask(engine)) == (39, n_shared)
    assert pages_read(engine) == [n_on_disk, 10 - n_on_disk]
    assert len(engine.stores[0].pages) == 10, "the disk has what came over the network"
    forget(engine)
    assert sources(ask(engine)) == (39, 0)
    assert pages_read(engine) == [10 + n_on_disk, 10 - n_on_disk]


def test_a_store_that_has_lost_all_gets_it_again_from_disk() -> None:
    engine = started_again()
    keep(engine.stores[1], 0, 0)
    assert sources(ask(engine)) == (39, 0)
    assert len(engine.stores[1].pages) == 10


@pytest.mark.parametrize("kind", [{}, {"n_states": 30}])
def test_a_store_that_was_behind_with_its_writes_gets_what_it_missed(kind: dict[str, int]) -> None:
    engine = Engine(n_pages=64, page_size=4, n_slots=64, has_disk=True, n_more_stores=1, **kind)
    disk, network = engine.stores
    engine.finishes_copies = False
    n_behind = 0
    for first in range(12):
        engine.add([first, *prompt(11)], max_tokens=1)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.turn()
        for _ in range(4):
            engine.copier.finish_all()
            disk.finish_all()
            engine.scheduler.schedule()
        n_behind = max(n_behind, len(disk.pages) - len(network.pages))
    assert len(disk.pages) > 20
    assert n_behind > 16, "the network is not behind"
    assert len(network.in_flight) <= 6, "it got no more than it can take"
    written = dict(disk.pages)
    engine.store_all()
    assert network.pages.keys() == written.keys()
    assert not engine.host_tier.disk.n_offers


def test_the_rest_of_a_prompt_is_looked_up_behind_what_is_on_disk() -> None:
    engine = started_again()
    keep(engine.stores[0], 0, 4)
    engine.stores[1].make_unknown(0)
    assert sources(ask(engine)) == (39, 23)
    assert pages_read(engine) == [4, 6]


@pytest.mark.parametrize(("look_up_s", "expected", "n_lookups"), [(0.1, (39, 23), 1), (1.5, (16, 0), 0)])
def test_a_lookup_is_not_waited_for_if_the_disk_alone_gains_more(
    look_up_s: float, expected: tuple[int, int], n_lookups: int
) -> None:
    """Computing takes 100 ms a token; the disk has 16 of 40 tokens, and another server has the others in the store.

    The disk alone gains 1.44 s. With the others, fetched in 1.68 s, it is 2.3 s without the wait for the lookup,
    which is the mean of this one and one of 0.5 s.
    """
    engine = started_again()
    keep(engine.stores[0], 0, 4)
    engine.stores[1].make_unknown(0)
    tier = engine.host_tier
    measure(tier, 0.01, 0.07)
    tier.choice.cost.add_look_up(look_up_s)
    n_before = tier.disk.n_lookups
    assert sources(ask(engine)) == expected
    assert tier.disk.n_lookups - n_before == n_lookups


def test_a_page_that_the_disk_cannot_read_comes_from_the_shared_store() -> None:
    engine = started_again(finishes_copies=False)
    engine.add(prompt(N_TOKENS))
    engine.turn()
    engine.stores[0].finish(n_pages=3)
    engine.turn()
    assert len(engine.stores[1].in_flight) == 1
    engine.stores[1].finish()
    engine.finishes_copies = True
    engine.run_to_the_end()
    engine.check_outputs()
    assert pages_read(engine) == [3, 7]


def test_what_neither_can_read_is_computed() -> None:
    engine = started_again(finishes_copies=False)
    request = engine.add(prompt(N_TOKENS))
    engine.turn()
    engine.stores[0].finish(n_pages=3)
    engine.turn()
    engine.stores[1].finish(n_pages=0)
    engine.turn()
    engine.finishes_copies = True
    engine.run_to_the_end()
    engine.check_outputs()
    assert sources(request) == (12, 0)


@pytest.mark.parametrize(
    ("disk_s", "network_s", "expected"),
    [
        (0.01, 0.02, (39, 23)),
        (0.01, 0.5, (16, 0)),  # computing the rest is faster than the network
        (0.5, 0.5, (0, 0)),
        (0.5, 0.02, (39, 23)),  # both at once take 16 * 0.5 s, and computing all takes 4 s less loads
    ],
)
def test_a_prompt_is_fetched_up_to_where_computing_is_faster(
    disk_s: float, network_s: float, expected: tuple[int, int]
) -> None:
    """Computing takes 100 ms a token; the disk has 16 of 40 tokens, the shared store the others."""
    engine = started_again()
    keep(engine.stores[0], 0, 4)
    keep(engine.stores[1], 4, 10)
    tier = engine.host_tier
    measure(tier, disk_s, network_s)
    cached = tier.match(Namespace(), token_bytes(prompt(N_TOKENS)))
    found = tier.match_disk(Namespace(), token_bytes(prompt(N_TOKENS)), cached)
    if expected[0]:
        assert found.n_disk in (16, 40)
    if (disk_s, network_s) == (0.5, 0.02):
        assert found.fetch_s == pytest.approx(8.0)
        assert not tier.choice.should_load(found)
        return
    assert sources(ask(engine)) == expected


def test_a_store_whose_part_was_long_cut_off_is_asked_again() -> None:
    """Computing takes 100 ms a token; the shared store takes 20 ms, and was measured at 5 s."""
    engine = started_again()
    tier = engine.host_tier
    measure(tier, 0.01, 5.0)
    pages = [dict(store.pages) for store in engine.stores]
    asked = []
    for _ in range(40):
        for store, has, kept in zip(engine.stores, pages, (range(4), range(4, 10)), strict=True):
            store.pages = {key: page for n, (key, page) in enumerate(has.items()) if n in kept}
        asked.append(sources(ask(engine)))
        forget(engine)
    assert asked == [(16, 0)] * 31 + [(39, 23)] * 9, "the 32nd looks again behind what the disk has given"


def test_an_explanation_says_from_where_a_request_would_fetch() -> None:
    engine = started_again()
    keep(engine.stores[0], 0, 4)
    hits = engine.scheduler.tiers.find(Namespace(), token_bytes(prompt(N_TOKENS)))
    assert (hits.n_on_disk, hits.is_fetched, hits.n_fetched, hits.n_from_shared) == (39, True, 39, 24)
    tier = engine.host_tier
    tier.choice.policy = "auto"
    tier.choice.cost.add_step(1000, 1000, 100.0)
    tier.choice.cost.add_load(1000, 0.001)
    tier.choice.cost.fetch_rate(1).add(1, 100.0)
    hits = engine.scheduler.tiers.find(Namespace(), token_bytes(prompt(N_TOKENS)))
    assert (hits.n_on_disk, hits.is_fetched, hits.n_fetched, hits.n_from_shared) == (39, True, 16, 0)
    assert hits.n_beyond_host == N_TOKENS


def test_each_store_says_what_it_has_of_a_prompt() -> None:
    engine = started_again()
    keep(engine.stores[0], 0, 7)
    keep(engine.stores[1], 0, 3)
    stored = engine.scheduler.tiers.stored(Namespace(), token_bytes(prompt(N_TOKENS)))
    assert (stored.n_on_disk, stored.n_in_shared) == (28, 12)


def left_out(n_chats: int, n_tokens: int) -> Engine:
    """Returns an engine whose second store is stuck, and lacks what is offered of chats chunk by chunk."""
    engine = Engine(
        n_pages=600, page_size=4, n_slots=2000, has_disk=True, n_more_stores=1, max_num_batched_tokens=64
    )
    engine.finishes_copies = False
    for number in range(n_chats):
        engine.add([number, *prompt(n_tokens - 1)], max_tokens=1)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.turn()
            engine.copier.finish_all()
            engine.stores[0].finish_all()
    for _ in range(50):
        engine.copier.finish_all()
        engine.stores[0].finish_all()
        engine.scheduler.schedule()
    return engine


def test_a_longer_offer_takes_the_place_of_its_beginnings_while_a_store_is_behind() -> None:
    engine = left_out(n_chats=8, n_tokens=640)
    disk = engine.host_tier.disk
    postponed = [bytes(offer.tokens) for offer in disk._postponed]
    assert 4 < len(postponed) <= 8
    assert not any(one != other and other.startswith(one) for one in postponed for other in postponed)
    engine.store_all()
    assert engine.stores[0].pages.keys() == engine.stores[1].pages.keys(), "nothing is left out for good"


def test_offers_that_wait_for_a_store_have_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_link, "MAX_POSTPONED_BYTES", 9000)
    engine = left_out(n_chats=12, n_tokens=400)
    disk = engine.host_tier.disk
    last = [bytes(offer.tokens[:4]) for offer in disk._postponed]
    assert sum(len(offer.tokens) for offer in disk._postponed) <= 9000
    assert last == [token_bytes([number]) for number in range(12 - len(last), 12)], "the oldest are dropped"
    assert len(last) == 5
    engine.store_all()
    assert not disk.n_offers


def test_close_does_not_wait_for_what_a_store_behind_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = left_out(n_chats=8, n_tokens=640)
    in_flight = [len(store.in_flight) for store in engine.stores]
    assert in_flight[1] > 0
    n_waits = [0]

    def wait(tier: HostTier, timeout_s: float) -> None:
        n_waits[0] += 1
        for store in engine.stores:
            store.finish()

    monkeypatch.setattr(HostTier, "wait", wait)
    for store in engine.stores:
        monkeypatch.setattr(store, "close", lambda timeout_s: None)
    engine.host_tier.close(timeout_s=60.0)
    assert n_waits[0] <= sum(in_flight)
    assert not engine.host_tier.disk.n_offers
    assert len(engine.stores[1].pages) < len(engine.stores[0].pages)


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_store_that_hangs_does_not_stop_writes_to_the_other(hanging: int) -> None:
    """Whatever is offered meanwhile, such as what it was left to write, over and over."""
    engine = Engine(n_pages=64, page_size=4, n_slots=160, has_disk=True, n_more_stores=1, finishes_copies=False)
    healthy = engine.stores[1 - hanging]

    def serve(first: int) -> None:
        engine.add([first, *prompt(11)], max_tokens=1)
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.turn()
            engine.copier.finish_all()
        for _ in range(4):
            engine.copier.finish_all()
            healthy.finish_all()
            engine.scheduler.schedule()

    serve(500)
    disk = engine.host_tier.disk
    assert disk is not None
    for _ in range(200):
        disk.offer(Namespace(), token_bytes([500, *prompt(11)]))
        disk.advance()
        healthy.finish_all()
    assert disk.store.members[1 - hanging].n_pages_writing == 0
    for number in range(501, 511):
        n_before = len(healthy.pages)
        serve(number)
        assert len(healthy.pages) > n_before
    engine.store_all()
    assert engine.stores[0].pages.keys() == engine.stores[1].pages.keys()
    assert [member.n_pages_writing for member in disk.store.members] == [0, 0]


def test_invalidation_reaches_both() -> None:
    engine = started_again()
    engine.invalidate(Namespace(), token_bytes(prompt(N_TOKENS)[:8]))
    assert [len(store.pages) for store in engine.stores] == [0, 0]
    assert sources(ask(engine)) == (0, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_states_come_from_the_store_that_has_them(lost: int) -> None:
    engine = Engine(n_pages=32, page_size=4, n_slots=60, has_disk=True, n_more_stores=1, n_states=8)
    engine.serve(prompt(N_TOKENS), max_tokens=1)
    engine.store_all()
    n_pages = len(engine.stores[0].pages)
    forget(engine)
    engine.stores[lost].pages.clear()
    request = ask(engine)
    assert request.cache_use.counted is not None
    assert request.cache_use.counted.n_fetched > 0
    assert pages_read(engine)[lost] == 0
    assert len(engine.stores[lost].pages) > 0, "it has been written again"
    assert len(engine.stores[lost].pages) <= n_pages


@pytest.mark.parametrize("lost", [0, 1])
def test_a_state_that_one_store_has_lost_is_written_again(lost: int) -> None:
    engine = Engine(n_pages=32, page_size=4, n_slots=60, has_disk=True, n_more_stores=1, n_states=8)
    engine.serve(prompt(N_TOKENS), max_tokens=1)
    engine.store_all()
    store = engine.stores[lost]
    states = store.pages.keys() - started_again().stores[0].pages.keys()
    assert 0 < len(states) < len(store.pages)
    forget(engine)
    for key in states:
        del store.pages[key]
    ask(engine)
    engine.store_all()
    assert store.pages.keys() & states, "the state that was fetched"


def test_an_end_of_a_fetch_has_the_price_of_the_shortest_load_with_its_state() -> None:
    """States are after 4 pages and after 9. The disk has all pages but the seventh, which is slow to come."""
    chat = [0 if token in MESSAGE_ENDS else token for token in prompt(N_TOKENS)]
    engine = Engine(n_pages=32, page_size=4, n_slots=60, has_disk=True, n_more_stores=1, n_states=8)
    for n_tokens in (18, 38):
        engine.serve(chat[:n_tokens], max_tokens=1)
    engine.store_all()
    forget(engine)
    keys = engine.store_keys(chat)
    del engine.stores[0].pages[keys[6]]
    for key in {*keys[:9]} - {keys[6]}:
        del engine.stores[1].pages[key]
    tier = engine.host_tier
    measure(tier, 0.01, 1.0)
    found = tier.disk.fetchable(Namespace(), token_bytes(chat), 0, 0)
    assert found == [(16, pytest.approx((6 + STATE_PARTS) * 4 * 0.01)), (36, pytest.approx(4.0))]
