"""Stores of two servers over the same objects against a dict; lookups, failures, hanging calls and damage."""

from __future__ import annotations

import asyncio
import itertools
import logging
import select
import threading
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.runtime.tiers.stores import shared_store as shared_store_module
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageCounts
from radixkv.runtime.tiers.stores.shared_store import MAX_STATE_NAMES, N_NAMES, PAUSE_S, SharedStore
from support.cases import examples
from support.fake_objects import PAGE_BYTES, FakeObjects, shared_store
from support.page_files import (
    PAGE_TOKEN_BYTES,
    START,
    TIMEOUT_S,
    buffers,
    keys_of,
    load_run,
    page_of,
    store_run,
    tokens_of,
    wait,
    wait_for,
)

STATES = StateKeys(3, 2, PAGE_TOKEN_BYTES)
"""Three pages each, after every second page of a sequence."""
RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
SERVERS = st.integers(0, 1)


def look_up(store: SharedStore, pages: Sequence[int]) -> int:
    """Looks a run of pages up; returns how many of them were found."""
    ticket = store.look_up(keys_of(pages))
    assert ticket is not None
    return wait(store, ticket).n_pages


class SharedMachine(RuleBasedStateMachine):
    """Two stores over the same objects beside a dict. A store may know less, but what it gives is right."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.networks = [FakeObjects(self.objects), FakeObjects(self.objects)]
        self.stores = [
            SharedStore(
                each,
                "the store",
                page_bytes=PAGE_BYTES,
                page_token_bytes=PAGE_TOKEN_BYTES,
                clock=itertools.count(step=PAUSE_S).__next__,  # each pause is over when the next call looks
            )
            for each in self.networks
        ]
        self.believed: list[set[bytes]] = [set(), set()]
        """Keys that each store has by what it has reported."""
        for store in self.stores:
            assert store.take_removed() == []

    def has(self, key: bytes) -> bool:
        return key[:32].hex() in self.objects

    def n_there(self, run: Sequence[int]) -> int:
        return next((n for n, key in enumerate(keys_of(run)) if not self.has(key)), len(run))

    @rule(server=SERVERS, run=RUNS)
    def store(self, server: int, run: Sequence[int]) -> None:
        n_stored = store_run(self.stores[server], run)
        n_known = self.stores[server].run(keys_of(run))
        if self.networks[server].fails:
            assert n_known in (0, n_stored), "pages that were known count, and none is known after a failure"
        else:
            assert n_known == n_stored == len(run)
        self.believed[server] |= set(keys_of(run)[:n_stored])

    @rule(server=SERVERS, run=RUNS)
    def look_up(self, server: int, run: Sequence[int]) -> None:
        n_found = look_up(self.stores[server], run)
        keys = keys_of(run)
        if self.networks[server].fails:
            assert n_found == 0
            return
        assert n_found == 0 or self.has(keys[n_found - 1])
        assert n_found == len(run) or not self.has(keys[n_found])
        assert self.stores[server].run(keys) >= n_found
        self.believed[server] |= set(keys[: self.stores[server].run(keys)])

    @rule(server=SERVERS, run=RUNS)
    def load(self, server: int, run: Sequence[int]) -> None:
        loaded = load_run(self.stores[server], run)
        assert loaded == [page_of(key, PAGE_BYTES) for key in keys_of(run)[: len(loaded)]]
        if not self.networks[server].fails:
            assert len(loaded) == self.n_there(run)
            self.believed[server] |= {key for key in keys_of(run) if self.stores[server].run((key,))}

    @rule(server=SERVERS, run=RUNS, with_leading=st.booleans())
    def remove_pages(self, server: int, run: Sequence[int], with_leading: bool) -> None:
        *leading, key = keys_of(run)
        store = self.stores[server]
        is_known = store.run((key,))
        removal = store.remove(key, leading if with_leading else ())
        finished = wait(store, removal.ticket)
        assert not store.run((key,))
        if not self.networks[server].fails:
            assert finished.n_pages == removal.n_pages
            assert not (is_known and self.has(key))

    @rule(server=SERVERS)
    def clear(self, server: int) -> None:
        before = dict(self.objects)
        wait(self.stores[server], self.stores[server].clear())
        assert self.stores[server].n_pages == 0
        assert self.objects == before

    @rule(run=RUNS)
    def lose(self, run: Sequence[int]) -> None:
        self.objects.pop(keys_of(run)[-1][:32].hex(), None)

    @rule(run=RUNS, at=st.integers(-600, 600), is_cut=st.booleans())
    def damage(self, run: Sequence[int], at: int, is_cut: bool) -> None:
        name = keys_of(run)[-1][:32].hex()
        if name not in self.objects or any(network.fails for network in self.networks):
            return
        value = bytearray(self.objects[name])
        at %= len(value)
        if is_cut:
            del value[at:]
        else:
            value[at] ^= 1
        self.objects[name] = bytes(value)
        assert len(load_run(self.stores[0], run)) < len(run)
        if self.n_there(run[:-1]) == len(run) - 1:
            assert name not in self.objects
        self.objects.pop(name, None)

    @rule(server=SERVERS, fails=st.booleans())
    def fail(self, server: int, fails: bool) -> None:
        self.networks[server].fails = fails

    @invariant()
    def what_leaves_a_store_is_reported(self) -> None:
        for store, believed in zip(self.stores, self.believed, strict=True):
            for key in store.take_removed():
                if not store.run((key,)):
                    believed.discard(key)
            assert all(store.run((key,)) for key in believed)
            assert store.n_bytes == PAGE_BYTES * store.n_pages

    def teardown(self) -> None:
        for store in self.stores:
            store.close(TIMEOUT_S)


def test_two_stores_over_the_same_objects() -> None:
    run = SharedMachine.TestCase
    run.settings = examples(40, stateful_step_count=25)
    run().runTest()


@examples(60)
@given(n_pages=st.integers(1, 700), share=st.floats(0, 1))
def test_a_lookup_finds_the_end_of_a_prefix_with_few_questions(n_pages: int, share: float) -> None:
    run = list(range(n_pages))
    n_there = round(share * n_pages)
    objects = FakeObjects({key[:32].hex(): b"" for key in keys_of(run)[:n_there]})
    with shared_store(objects) as store:
        assert look_up(store, run) == n_there == store.run(keys_of(run))
    assert len(objects.questions) <= (1 if n_there in (0, n_pages) else 4)
    assert max(map(len, objects.questions)) <= N_NAMES


def look_up_states(store: SharedStore, pages: Sequence[int]) -> list[int]:
    """Looks a run of pages up; returns after how many of them the store is known to have the whole state."""
    keys = keys_of(pages)
    ticket = store.look_up(keys, states=STATES)
    assert ticket is not None
    n_found = wait(store, ticket).n_pages
    assert store.run(keys) == n_found
    ends = list(STATES.ends(len(pages)))
    assert all(end <= n_found for end in ends if store.run(STATES.all(keys[end - 1])))
    return [end for end in ends if store.run(STATES.all(keys[end - 1])) == STATES.n_pages]


def names_of(pages: Sequence[int], n_pages: int, ends: dict[int, int]) -> dict[str, bytes]:
    """Returns objects for leading pages, and for so many leading pages of the state after each end."""
    keys = keys_of(pages)
    of_states = [key for end, n_parts in ends.items() for key in STATES.all(keys[end - 1])[:n_parts]]
    return {key[:32].hex(): b"" for key in (*keys[:n_pages], *of_states)}


@examples(60)
@given(
    n_there=st.integers(0, 40),
    ends=st.dictionaries(st.integers(1, 20).map(lambda n: 2 * n), st.integers(1, 3), max_size=6),
)
@example(n_there=40, ends={40: 2, 38: 3, 20: 3})
def test_a_lookup_finds_the_deepest_whole_state_that_has_all_pages_before_it(
    n_there: int, ends: dict[int, int]
) -> None:
    run = list(range(41))
    with shared_store(FakeObjects(names_of(run, n_there, ends))) as store:
        whole = [end for end, n_parts in sorted(ends.items()) if end <= n_there and n_parts == STATES.n_pages]
        assert look_up_states(store, run) == whole[-1:]


@pytest.mark.parametrize(
    ("n_behind", "n_states_asked"),
    [(0, [16]), (15, [16]), (16, [16, 32]), (MAX_STATE_NAMES - 1, [16, 32, 64, 128])],
)
def test_few_questions_find_a_state_near_the_end_and_a_bounded_number_one_far_away(
    n_behind: int, n_states_asked: list[int]
) -> None:
    run = list(range(2 * MAX_STATE_NAMES + 20))
    end = len(run) - 2 * n_behind
    objects = FakeObjects(names_of(run, len(run), {end: STATES.n_pages, 2: STATES.n_pages}))
    with shared_store(objects) as store:
        assert look_up_states(store, run) == [end]
    assert list(map(len, objects.questions)) == [N_NAMES, *n_states_asked, STATES.n_pages]


def test_a_state_too_far_from_the_end_is_not_found_and_the_store_is_not_away() -> None:
    run = list(range(2 * MAX_STATE_NAMES + 20))
    objects = FakeObjects(names_of(run, len(run), {2: STATES.n_pages}))
    with shared_store(objects) as store:
        assert look_up_states(store, run) == []
        assert store.run(keys_of(run)) == len(run)
        assert not store.health.is_away


WINDOWS = StateKeys(2, 1, PAGE_TOKEN_BYTES, n_parts=4)
"""Window tails of four parts of two pages each, after any page of a sequence."""


def window_names(pages: Sequence[int], n_pages: int, ends: Iterable[int]) -> dict[str, bytes]:
    """Returns objects for leading pages, and for the window tails after some of them."""
    keys = keys_of(pages)
    entries = {entry for end in ends for entry in WINDOWS.parts(end)}
    return {
        key[:32].hex(): b"" for key in (*keys[:n_pages], *(key for n in entries for key in WINDOWS.all(keys[n])))
    }


def look_up_window(store: SharedStore, pages: Sequence[int], first: int = 0) -> int:
    """Looks pages and windows up; returns after how many pages the deepest known window is."""
    keys = keys_of(pages)
    ticket = store.look_up(keys, first, WINDOWS)
    assert ticket is not None
    last = first + wait(store, ticket).n_pages
    return WINDOWS.deepest(keys, last, first, lambda key: store.run(pages := WINDOWS.all(key)) == len(pages))


@examples(60)
@given(
    n_there=st.integers(0, 60),
    ends=st.sets(st.integers(1, 60), max_size=6),
    first=st.integers(0, 60),
)
@example(n_there=60, ends={60}, first=0)
@example(n_there=60, ends={58, 57, 2}, first=57)
def test_a_lookup_finds_the_deepest_window_of_which_all_parts_are_there(
    n_there: int, ends: set[int], first: int
) -> None:
    """Also where another window has the first parts of it, or they are before the pages that are looked for."""
    run = list(range(61))
    with shared_store(FakeObjects(window_names(run, n_there, ends))) as store:
        found = [end for end in ends if first < end <= n_there]
        assert look_up_window(store, run, first) == max(found, default=first)


def test_few_questions_find_a_window_far_from_the_end_of_the_pages() -> None:
    run, windows = list(range(3000)), StateKeys(1, 1, PAGE_TOKEN_BYTES, n_parts=64)
    keys = keys_of(run)
    for end in (3000, 2990, 1234, 64, 5):
        parts = [windows.first(keys[entry]) for entry in windows.parts(end)]
        objects = FakeObjects({key[:32].hex(): b"" for key in (*keys, *parts)})
        with shared_store(objects) as store:
            ticket = store.look_up(keys, states=windows)
            assert ticket is not None
            wait(store, ticket)
            assert store.run(parts) == len(parts)
        assert len(objects.questions) <= 8
        assert sum(map(len, objects.questions)) <= 7 * N_NAMES


def test_a_window_of_which_a_part_is_lost_gives_way_to_one_before_it() -> None:
    run = list(range(40))
    names = window_names(run, 40, {40, 30})
    del names[WINDOWS.all(keys_of(run)[37])[1][:32].hex()]
    with shared_store(FakeObjects(names)) as store:
        assert look_up_window(store, run) == 30


@pytest.mark.parametrize("removes_state", [False, True])
def test_a_state_that_is_being_removed_is_not_found(removes_state: bool) -> None:
    run = [1, 2, 3, 4]
    objects = FakeObjects(names_of(run, 4, {4: 3, 2: 3}))
    objects.n_parallel = 16
    with shared_store(objects) as store:
        assert look_up_states(store, run) == [4]
        objects.delete = hanging = Hanging()  # type: ignore[method-assign]
        removal = store.remove(STATES.first(keys_of(run)[-1]) if removes_state else keys_of(run)[-1])
        assert removal.n_pages == (3 if removes_state else 4)
        ticket = store.look_up(keys_of(run), states=STATES)
        assert ticket is not None
        assert wait(store, ticket).n_pages == (4 if removes_state else 3)
        assert store.run(STATES.all(keys_of(run)[-1])) == 0
        hanging.is_open.set()
        wait(store, removal.ticket)


def test_a_store_that_fails_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    objects = FakeObjects()
    now = 0.0
    with shared_store(objects, clock=lambda: now) as store:
        assert store_run(store, [1, 2]) == 2
        assert (store.health.n_failures, store.health.is_away) == (0, False)
        objects.fails = True
        assert load_run(store, [1, 2]) == []
        n_calls = objects.n_calls
        assert (store.health.n_failures, store.health.is_away) == (1, True)
        assert store.run(keys_of([1, 2])) == store.n_pages == 0
        assert store.look_up(keys_of([1, 2])) is None
        assert load_run(store, [1, 2]) == []
        assert store_run(store, [3]) == 0
        assert objects.n_calls == n_calls
        now += PAUSE_S
        assert look_up(store, [1, 2]) == 0
        assert (store.health.n_failures, store.health.is_away) == (2, True)
        objects.fails = False
        now += PAUSE_S
        assert look_up(store, [1, 2]) == 2
        assert (store.health.n_failures, store.health.is_away) == (2, False)
        assert len(load_run(store, [1, 2])) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the shared store is away, so prompts are computed; it is tried again every 10 s: the network is down",
        "the shared store is back",
    ]


@pytest.mark.parametrize("call", ["look_up", "load", "store"])
def test_a_call_that_hangs_ends_in_time(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    for name in ("LOOK_UP_TIMEOUT_S", "LOAD_TIMEOUT_S", "STORE_TIMEOUT_S"):
        monkeypatch.setattr(shared_store_module, name, 0.05)
    objects = FakeObjects()
    with shared_store(objects) as store:
        store_run(store, [1, 2])
        objects.is_open.clear()
        slots = buffers(2, PAGE_BYTES)
        started = time.monotonic()
        if call == "look_up":
            ticket = store.look_up(keys_of([1, 2]))
        else:
            run = [1, 2] if call == "load" else [3, 4]
            ticket = getattr(store, call)(keys_of(run), tokens_of(run), slots)
        assert wait(store, ticket).n_pages == 0
        assert time.monotonic() - started < 5
        assert store.health.is_away
        objects.is_open.set()
        time.sleep(0.02)
        assert not any(map(any, slots))  # nobody has written to a buffer since


def test_pages_that_arrived_before_a_failure_count() -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        store_run(store, [1, 2, 3])
        objects.objects.pop(keys_of([1, 2, 3])[-1][:32].hex())
        assert len(load_run(store, [1, 2, 3])) == 2
        assert store.run(keys_of([1, 2, 3])) == 2
        assert not store.health.is_away
        assert store_run(store, [1, 2, 3]) == 3


def test_only_pages_that_are_damaged_or_gone_are_lost() -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        assert store_run(store, range(9)) == 9
        assert store.counts == PageCounts(n_written=9)
        names = [key[:32].hex() for key in keys_of(range(9))]
        objects.objects[names[6]] = bytes(len(objects.objects[names[6]]))
        load_run(store, range(9))
        assert store.counts.n_lost == 1
        del objects.objects[names[3]]
        assert len(load_run(store, range(6))) == 3
        assert store.counts.n_lost == 2
        assert load_run(store, [7]) == [], "it was never known to have this page"
        store_run(store, range(9))
        assert store.counts == PageCounts(n_written=11, n_lost=2), "those two again"
        objects.fails = True
        load_run(store, range(9))
        assert store.counts.n_lost == 2, "a store that is away has lost nothing"
    with shared_store(FakeObjects(objects.objects)) as other:
        store_run(other, range(9))
        assert other.counts == PageCounts(), "another server has written them"


def test_a_full_store_is_not_away(caplog: pytest.LogCaptureFixture) -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        store_run(store, [1])
        objects.is_full = True
        assert store_run(store, [1, 2]) == 1
        assert not store.health.is_away
        assert len(load_run(store, [1])) == 1
    assert "a page is not stored: the shared store is full" in caplog.text


def test_a_removal_drops_a_store_that_is_under_way() -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        objects.is_open.clear()
        ticket = store.store(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
        while not objects.n_calls:
            time.sleep(0.001)
        removal = store.remove(START)
        objects.is_open.set()
        assert wait_for(store, [ticket, removal.ticket]) == {ticket: 0, removal.ticket: 0}
        assert objects.objects == {}
        assert store.n_pages == 0


def test_pages_that_are_being_removed_are_not_found() -> None:
    objects = FakeObjects()
    objects.n_parallel = 16
    with shared_store(objects) as store:
        store_run(store, [1, 2, 3])
        objects.delete = hanging = Hanging()  # type: ignore[method-assign]
        *leading, key = keys_of([1, 2, 3])
        removal = store.remove(key, leading)
        assert removal.n_pages == 3
        assert look_up(store, [1, 2, 3]) == 0
        assert store_run(store, [1, 2, 3]) == 0
        hanging.is_open.set()
        assert wait(store, removal.ticket).n_pages == 3
        assert store_run(store, [1, 2, 3]) == 3


def test_a_load_under_way_does_not_find_again_what_is_being_removed() -> None:
    objects = FakeObjects()
    objects.n_parallel = 16
    with shared_store(objects) as store:
        store_run(store, [1, 2])
        objects.delete = hanging = Hanging()  # type: ignore[method-assign]
        objects.is_open.clear()
        n_calls, keys = objects.n_calls, keys_of([1, 2])
        ticket = store.load(keys, tokens_of([1, 2]), buffers(2, PAGE_BYTES))
        while objects.n_calls == n_calls:
            time.sleep(0.001)
        removal = store.remove(keys[1], keys[:1])
        objects.is_open.set()
        wait(store, ticket)
        assert store.run(keys) == 0
        hanging.is_open.set()
        assert wait(store, removal.ticket).n_pages == 2


def test_a_lookup_finds_no_page_that_was_being_removed_when_it_began() -> None:
    objects = FakeObjects()
    objects.n_parallel = 16
    with shared_store(objects) as store:
        store_run(store, [1, 2])
        objects.delete = hanging = Hanging()  # type: ignore[method-assign]
        keys = keys_of([1, 2])
        removal = store.remove(keys[1], keys[:1])
        objects.is_open.clear()
        ticket = store.look_up(keys)
        assert ticket is not None
        hanging.is_open.set()
        wait(store, removal.ticket)
        objects.is_open.set()
        assert wait(store, ticket).n_pages == 0
        assert store.run(keys) == 0


class Hanging:
    """A ``delete`` that waits."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    async def __call__(self, name: str) -> bool:
        while not self.is_open.is_set():
            await asyncio.sleep(0.001)
        return True


def test_a_page_that_the_store_keeps_does_not_stop_the_removal_of_others() -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        store_run(store, [1, 2, 3])
        objects.kept = set(list(objects.objects)[1:2])
        *leading, key = keys_of([1, 2, 3])
        assert wait(store, store.remove(key, leading).ticket).n_pages == 2
        assert objects.objects.keys() == objects.kept


def test_known_pages_are_bounded() -> None:
    with shared_store(FakeObjects(), max_known_pages=5) as store:
        store_run(store, list(range(9)))
        assert store.n_pages == 5
        assert len(load_run(store, list(range(9)))) == 9  # they are in the store all the same
        assert store.n_pages == 5


def test_closing_finishes_stores_and_leaves_no_thread() -> None:
    threads = set(threading.enumerate())
    objects = FakeObjects()
    with shared_store(objects) as store:
        store.store(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
    assert len(objects.objects) == 2
    assert set(threading.enumerate()) == threads

    objects.is_open.clear()
    started = time.monotonic()
    with shared_store(objects) as store:
        store.load(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
    assert time.monotonic() - started < 5
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("is_load", [False, True])
def test_the_time_of_a_transfer_begins_after_those_before_it(is_load: bool) -> None:
    objects = FakeObjects()
    with shared_store(objects) as store:
        n_pages = objects.n_parallel if is_load else 1
        first, second = list(range(n_pages)), [100]
        if is_load:
            for run in (first, second):
                assert store_run(store, run) == len(run)
        objects.is_open.clear()
        begin = store.load if is_load else store.store
        tickets = [begin(keys_of(run), tokens_of(run), buffers(len(run), PAGE_BYTES)) for run in (first, second)]
        time.sleep(0.5)
        objects.is_open.set()
        finished = wait_all(store, tickets)
        waited, at_once = (finished[ticket] for ticket in tickets)
        assert (waited.n_pages, at_once.n_pages) == (n_pages, 1)
        assert at_once.seconds < 0.4 < waited.seconds


def wait_all(store: SharedStore, tickets: Sequence[int]) -> dict[int, FinishedTransfer]:
    """Waits until transfers have finished; returns them by ticket."""
    finished: dict[int, FinishedTransfer] = {}
    while len(finished) < len(tickets):
        assert select.select([store.fileno()], [], [], TIMEOUT_S)[0], "the transfers do not finish"
        finished |= {one.ticket: one for one in store.take_finished()}
    return finished
