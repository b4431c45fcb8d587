"""Several stores as one, against a naive model: the right bits, from a store that has them, and the cheapest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest

from radixkv.runtime.tiers.fetch_rate import FetchRate
from radixkv.runtime.tiers.stores.joined_store import MAX_PASSED_OVER, JoinedStore, StartedStore
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageCounts, Removal, StoreHealth

PAGE_TOKENS = 16
PAGE_BYTES = 8
TOKEN_BYTES = 4 * PAGE_TOKENS
POISON = b"\xaa" * PAGE_BYTES


def key_of(page: int) -> bytes:
    return page.to_bytes(32, "big") + max(0, page - 1).to_bytes(32, "big")


def tokens_of(page: int) -> bytes:
    return page.to_bytes(4, "big") * PAGE_TOKENS


def content_of(page: int) -> bytes:
    return (page * 7919).to_bytes(PAGE_BYTES, "big")


class Member:
    """A ``PageStore`` whose transfers take the time of a line, and finish when the test says."""

    page_bytes = PAGE_BYTES
    n_bytes = 0
    counts = PageCounts()

    def __init__(self, latency_s: float = 0.0, page_s: float = 0.0, *, is_shared: bool = False) -> None:
        self.latency_s, self.page_s = latency_s, page_s
        self.pages: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        """Pages that are known and cannot be read."""
        self.fails_after: int | None = None
        """Pages that loads read before they fail."""
        self.health = StoreHealth(0, is_away=False) if is_shared else None
        self.asked: list[bytes] = []
        self.in_flight: list[tuple[int, Sequence[bytes], Sequence[bytes], Sequence[memoryview], bool]] = []
        self.looked_up: list[int] = []
        self.unknown: dict[bytes, bytes] = {}
        """Pages that a lookup finds."""
        self.spared: Sequence[bytes] = ()
        self.closed: float | None = None
        self.n_asked_for = 0
        """Keys in all questions, also behind the first that is missing."""
        self._finished: list[FinishedTransfer] = []
        self._n_tickets = 0

    @property
    def n_pages(self) -> int:
        return len(self.pages)

    def run(self, keys: Sequence[bytes]) -> int:
        self.n_asked_for += len(keys)
        return next((n for n, key in enumerate(keys) if key not in self.pages), len(keys))

    def has(self, key: bytes) -> bool:
        self.n_asked_for += 1
        return key in self.pages

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        if self.health is None:
            return None
        self.looked_up.append(first)
        found = {key: self.unknown.pop(key) for key in keys if key in self.unknown}
        self.pages |= found
        return self._end(len(found))

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        assert all(key in self.pages for key in keys), "a page is asked of a member that has it not"
        self.asked += keys
        return self._begin(keys, tokens, buffers, is_load=True)

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        return self._begin(keys, tokens, buffers, is_load=False)

    def spare(self, keys: Sequence[bytes]) -> None:
        self.spared = keys

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        n_pages = len([self.pages.pop(one) for one in (key, *leading) if one in self.pages])
        return Removal(self._end(n_pages), n_pages)

    def clear(self) -> int:
        n_pages = len(self.pages)
        self.pages.clear()
        return self._end(n_pages)

    def take_removed(self) -> list[bytes]:
        return []

    def take_finished(self) -> list[FinishedTransfer]:
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        return id(self) % 1000

    def close(self, timeout_s: float) -> None:
        self.closed = timeout_s

    def finish(self) -> None:
        ticket, keys, tokens, buffers, is_load = self.in_flight.pop(0)
        n_pages = 0
        for key, of_page, buffer in zip(keys, tokens, buffers, strict=True):
            page = int.from_bytes(key[:32], "big")
            assert of_page == tokens_of(page)
            if is_load:
                if key in self.damaged or n_pages == self.fails_after:
                    self.pages.pop(key, None)
                    break
                assert bytes(buffer) == POISON, "a page is read twice"
                buffer[:] = self.pages[key]
            else:
                assert bytes(buffer) == content_of(page)
                self.pages[key] = bytes(buffer)
                self.damaged.discard(key)
            n_pages += 1
        seconds = self.latency_s + self.page_s * len(keys)
        self._finished.append(FinishedTransfer(ticket, n_pages, seconds))

    def _begin(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview], *, is_load: bool) -> int:
        self._n_tickets += 1
        of_pages = [tokens[first : first + TOKEN_BYTES] for first in range(0, len(tokens), TOKEN_BYTES)]
        self.in_flight.append((self._n_tickets, list(keys), of_pages, list(buffers), is_load))
        return self._n_tickets

    def _end(self, n_pages: int) -> int:
        self._n_tickets += 1
        self._finished.append(FinishedTransfer(self._n_tickets, n_pages, 0.0))
        return self._n_tickets


def joined(*members: Member) -> JoinedStore:
    return JoinedStore(members, [FetchRate() for _ in members], PAGE_TOKENS)


def wait(
    store: JoinedStore, members: Sequence[Member], ticket: int, random: Random | None = None
) -> FinishedTransfer:
    """Finishes the transfers in flight, in any order, until one has ended."""
    for _ in range(100):
        for finished in store.take_finished():
            if finished.ticket == ticket:
                return finished
        if busy := [member for member in members if member.in_flight]:
            (busy[0] if random is None else random.choice(busy)).finish()
    raise AssertionError("the transfer does not end")


def load(
    store: JoinedStore,
    members: Sequence[Member],
    pages: Sequence[int],
    random: Random | None = None,
    declined: Sequence[int] = (),
) -> tuple[int, ...]:
    """Loads pages, and compares them; returns the numbers of the members of those that were read."""
    buffers = [memoryview(bytearray(POISON)) for _ in pages]
    keys, others = ([key_of(page) for page in some] for some in (pages, declined))
    ticket = store.load(keys, b"".join(map(tokens_of, pages)), buffers, others)
    finished = wait(store, members, ticket, random)
    for page, buffer in list(zip(pages, buffers, strict=True))[: finished.n_pages]:
        assert bytes(buffer) == content_of(page)
    sources = store.take_sources(ticket)
    assert len(sources) == finished.n_pages
    return sources


def put(member: Member, pages: Sequence[int]) -> None:
    member.pages |= {key_of(page): content_of(page) for page in pages}


@pytest.mark.parametrize("n_members", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_random_members(n_members: int, seed: int) -> None:
    """Pages come and go in each member; loads fail anywhere. A load has the right bits of all that it can have."""
    random = Random(seed)
    members = [Member(random.random() / 100, random.random() / 1000, is_shared=n > 0) for n in range(n_members)]
    store = joined(*members)
    for _ in range(60):
        first = random.randrange(30)
        pages = list(range(first, first + random.randint(1, 12)))
        keys = [key_of(page) for page in pages]
        match random.choice(("store", "load", "load", "load", "evict", "damage")):
            case "store":
                started = write(store, pages)
                assert started is not None
                assert wait(store, members, started.ticket, random).n_pages == len(pages)
                assert store.run_of_all(keys) == len(pages)
            case "evict":
                member = random.choice(members)
                for key in random.sample(sorted(member.pages), min(len(member.pages), 5)):
                    del member.pages[key]
            case "damage":
                member = random.choice(members)
                member.damaged |= set(random.sample(sorted(member.pages), min(len(member.pages), 2)))
            case _:
                known = [any(key in member.pages for member in members) for key in keys]
                assert store.run(keys) == (known.index(False) if False in known else len(keys))
                assert store.run_of_all(keys) == min(member.run(keys) for member in members)
                pages = pages[: store.run(keys)]
                failing = [member for member in members if random.random() < 0.2]
                for member in failing:
                    member.fails_after = random.randrange(6)
                sound_ones = [one for one in members if one not in failing and not one.damaged & one.pages.keys()]
                sound = [any(key_of(page) in member.pages for member in sound_ones) for page in pages]
                holders = [{n for n, member in enumerate(members) if key in member.pages} for key in keys]
                for member in members:
                    member.asked.clear()
                sources = load(store, members, pages, random) if pages else ()
                assert all(source in holders[n] for n, source in enumerate(sources))
                assert len(sources) >= (sound.index(False) if False in sound else len(pages))
                n_asked = Counter(key for member in members for key in member.asked)
                if not failing and not any(member.damaged for member in members):
                    assert len(sources) == len(pages)
                    assert set(n_asked.values()) <= {1}, "a page is read twice"
                assert all(n <= n_members for n in n_asked.values())
                for member in members:
                    assert len(set(member.asked)) == len(member.asked), "a member is asked twice"
                    member.fails_after = None


def test_the_first_member_gives_the_pages_until_another_is_measured_to_be_faster() -> None:
    """A disk takes 1 ms a page, the network 20 ms and 0.1 ms a page."""
    disk, network = members = Member(0.0, 0.001), Member(0.02, 0.0001, is_shared=True)
    store = joined(*members)
    for member in members:
        put(member, range(200))
    for n_pages in (10, 100, 200):
        assert set(load(store, members, range(n_pages))) == {0}
    assert not network.asked
    put(network, range(200, 500))
    assert set(load(store, members, range(200, 220))) == {1}, "the disk has none of them"
    assert set(load(store, members, range(200, 500))) == {1}
    disk.asked.clear()
    assert set(load(store, members, range(4))) == {0}, "4 ms, and not 20.4"
    assert set(load(store, members, range(100))) == {1}, "30 ms, and not 100"
    estimates = store.seconds([key_of(page) for page in range(100)])
    assert estimates == [(100, pytest.approx(0.03))]


def test_each_run_comes_from_the_member_that_has_it() -> None:
    disk, network = members = Member(0.0, 0.001), Member(0.02, 0.001, is_shared=True)
    store = joined(*members)
    put(disk, [*range(10), *range(20, 30)])
    put(network, range(8, 40))
    keys = [key_of(page) for page in range(40)]
    expected = (*(0,) * 10, *(1,) * 10, *(0,) * 10, *(1,) * 10)
    assert load(store, members, range(40)) == expected
    assert (len(disk.asked), len(network.asked)) == (20, 20)
    assert [n for n, _ in store.seconds(keys)] == [10, 20, 30, 40]
    assert store.seconds(keys)[0][1] == pytest.approx(0.01)
    assert store.seconds(keys)[3][1] == pytest.approx(0.04), "the members read beside each other"
    assert (store.members[0].n_pages_read, store.members[1].n_pages_read) == (20, 20)
    disk.pages = dict(list(disk.pages.items())[:10])
    network.pages.clear()
    assert [n for n, _ in store.seconds(keys)] == [10, 40], "the rest may be found in the network"
    assert store.seconds(keys)[1][1] == pytest.approx(30 * 0.04 / 20), "nothing tells its fixed time yet"


def test_a_member_that_was_long_passed_over_is_measured_again() -> None:
    disk, memory = members = Member(0.0, 0.001), Member(0.0, 0.0001, is_shared=True)
    store = joined(*members)
    for member in members:
        put(member, range(10))
    sources = [load(store, members, range(10))[0] for _ in range(MAX_PASSED_OVER + 10)]
    assert sources == [0] * MAX_PASSED_OVER + [1] * 10
    memory.page_s = 0.1
    sources = [load(store, members, range(10))[0] for _ in range(10)]
    assert sources[-1] == 0, "it has become slow"
    assert len(disk.asked) > 10 * MAX_PASSED_OVER


def test_a_member_whose_pages_were_long_computed_instead_is_measured_again() -> None:
    disk, network = members = Member(0.0, 0.001), Member(0.02, 0.001, is_shared=True)
    store = joined(*members)
    put(disk, range(10))
    put(network, range(10, 20))
    network.page_s = 10.0
    load(store, members, range(20))
    network.page_s = 0.001
    keys = [key_of(page) for page in range(20)]
    for _ in range(MAX_PASSED_OVER):
        assert store.seconds(keys)[-1][1] > 50
        load(store, members, range(10), declined=range(10, 20))
    assert store.seconds(keys) == [(10, pytest.approx(0.01)), (20, pytest.approx(0.01))], "it counts as free"
    load(store, members, range(20))
    assert store.seconds(keys)[-1][1] == pytest.approx(0.03), "what was measured before is forgotten"


def test_what_a_member_cannot_give_comes_from_the_other() -> None:
    disk, network = members = Member(0.0, 0.001), Member(0.02, 0.001, is_shared=True)
    store = joined(*members)
    put(disk, range(20))
    put(network, range(15))
    disk.fails_after = 5
    assert load(store, members, range(20)) == (*(0,) * 5, *(1,) * 10)
    assert len(network.asked) == 10, "what the disk has given is not fetched again"
    disk.fails_after, network.fails_after = 0, 0
    assert load(store, members, range(1, 10)) == ()


def test_what_the_first_member_has_lost_is_looked_up_in_the_other() -> None:
    disk, network = members = Member(0.0, 0.001), Member(0.02, 0.001, is_shared=True)
    store = joined(*members)
    put(disk, range(20))
    put(network, range(18))
    network.unknown, network.pages = network.pages, {}
    disk.fails_after = 3
    assert load(store, members, range(20)) == (*(0,) * 3, *(1,) * 15)
    assert network.looked_up == [0], "once"
    assert [member.n_pages_read for member in store.members] == [3, 15]
    assert store.members[1].rate.seconds(15 * PAGE_TOKENS) == pytest.approx(0.035), "without the lookup"
    disk.fails_after = 0
    put(disk, [30])
    assert load(store, members, [30]) == ()


def test_a_write_goes_to_all_members_and_counts_once_one_has_it() -> None:
    disk, network = members = Member(), Member(is_shared=True)
    store = joined(*members)
    keys = [key_of(page) for page in range(3)]
    started = write(store, range(3))
    assert started is not None
    disk.finish()
    assert store.take_finished() == [], "the other one still reads the buffers"
    network.finish()
    assert store.take_finished() == [FinishedTransfer(started.ticket, 3, 0.0)]
    assert (disk.run(keys), network.run(keys), store.are_uneven(keys)) == (3, 3, False)
    del network.pages[keys[1]]
    assert (store.run(keys), store.run_of_all(keys), store.are_uneven(keys)) == (3, 1, True)
    removal = store.remove(keys[2])
    assert removal.n_pages == 2
    assert [one.n_pages for one in store.take_finished() if one.ticket == removal.ticket] == [2]
    assert store.health is not None
    store.close(5.0)
    assert disk.closed is not None
    assert network.closed is not None


def write(store: JoinedStore, pages: Sequence[int], max_behind: int = 99) -> StartedStore | None:
    buffers = [memoryview(bytearray(content_of(page))) for page in pages]
    return store.store(
        [key_of(page) for page in pages], b"".join(map(tokens_of, pages)), buffers, max_behind=max_behind
    )


def test_a_member_that_is_slow_to_write_does_not_hold_up_the_other() -> None:
    disk, network = members = Member(), Member(is_shared=True)
    store = joined(*members)
    are_all_in_time = []
    for first in range(0, 20, 4):
        started = write(store, range(first, first + 4), max_behind=6)
        assert started is not None
        are_all_in_time.append(started.are_all_in_time)
        disk.finish()
        store.take_finished()
    assert (len(disk.pages), len(network.in_flight)) == (20, 2), "8 pages are more than 6"
    assert are_all_in_time == [True, True, False, False, False]
    assert store.is_behind(6)
    assert write(store, range(8, 12), max_behind=6) is None, "only the network lacks them"
    network.finish()
    assert [one.n_pages for one in store.take_finished()] == [4]
    assert not store.is_behind(6)
    assert write(store, range(8, 12), max_behind=6) is not None, "it has caught up"
    assert (len(disk.in_flight), len(network.in_flight)) == (0, 2)
    assert store.are_uneven([key_of(page) for page in range(20)])


def test_each_member_gets_what_it_lacks() -> None:
    disk, network = members = Member(), Member(is_shared=True)
    store = joined(*members)
    put(disk, range(3))
    put(network, range(1))
    started = write(store, range(5))
    assert started is not None
    assert [[int.from_bytes(key[:32], "big") for key in member.in_flight[0][1]] for member in members] == [
        [3, 4],
        [1, 2, 3, 4],
    ]
    assert wait(store, members, started.ticket).n_pages == 5
    assert [member.n_pages for member in members] == [5, 5]
    assert [member.n_pages_writing for member in store.members] == [0, 0]
    started = write(store, range(5))
    assert started is not None
    assert wait(store, members, started.ticket).n_pages == 5


@pytest.mark.parametrize("has_more", [0, 1])
def test_a_store_says_how_many_pages_it_writes_to_the_one_that_lacks_most(has_more: int) -> None:
    members = Member(), Member(is_shared=True)
    store = joined(*members)
    put(members[has_more], range(3))
    put(members[1 - has_more], range(1))
    started = write(store, range(5))
    assert started is not None
    assert started.n_new == 4
    again = write(store, range(5))
    assert again is not None
    assert again.n_new == 0, "all are on their way"


@pytest.mark.parametrize("question", [JoinedStore.run, JoinedStore.seconds, JoinedStore.sources])
@pytest.mark.parametrize("has_all", [False, True])
def test_questions_are_linear_in_the_changes_of_member(question: Callable[..., object], has_all: bool) -> None:
    n_pages = 6250
    first, second = Member(), Member()
    put(first, range(0, n_pages, 1 if has_all else 2))
    put(second, range(1, n_pages, 2))
    store = joined(first, second)
    for member in store.members:
        member.rate.add(PAGE_TOKENS, 0.001)
    question(store, [key_of(page) for page in range(n_pages)])
    assert first.n_asked_for + second.n_asked_for <= 8 * n_pages


def test_a_rate_has_a_fixed_time_and_one_per_token() -> None:
    rate = FetchRate()
    assert (rate.is_known, rate.seconds(100), rate.s_per_token) == (False, 0.0, None)
    rate.add(100, 0.1)
    assert rate.seconds(1000) == pytest.approx(1.0), "nothing tells the fixed time yet"
    for n_tokens in (100, 1000, 500, 2000) * 5:
        rate.add(n_tokens, 0.05 + n_tokens * 1e-4)
    assert rate.seconds(0) == 0.0
    assert rate.seconds(100) == pytest.approx(0.06, rel=0.1)
    assert rate.seconds(10_000) == pytest.approx(1.05, rel=0.1)
    before = rate.seconds(1000)
    rate.add(1000, 100.0)
    assert rate.seconds(1000) < 2 * before, "one that waited for something else counts little"


@pytest.mark.parametrize("seed", range(20))
def test_a_fixed_time_never_makes_long_fetches_dearer_or_short_ones_cheaper(seed: int) -> None:
    random = Random(seed)
    rate = FetchRate()
    for _ in range(30):
        rate.add(random.randint(1, 2000), random.random())
        mean_s = rate.s_per_token
        assert mean_s is not None
        assert rate.seconds(1) >= mean_s * (1 - 1e-9)
        assert rate.seconds(10_000) <= 10_000 * mean_s * (1 + 1e-9)
        assert 0 <= rate.seconds(1) <= rate.seconds(500) + 1e-9


def on_their_way(member: Member) -> list[int]:
    """Returns the pages that are being written, each as often as it is."""
    return [int.from_bytes(key[:32], "big") for _, keys, *_ in member.in_flight for key in keys]


def test_pages_on_their_way_are_not_written_twice() -> None:
    disk, network = members = Member(), Member(is_shared=True)
    store = joined(*members)
    put(network, range(2))
    started = [write(store, range(4)), write(store, range(4)), write(store, range(6))]
    tickets = [one.ticket for one in started if one is not None]
    assert on_their_way(disk) == [0, 1, 2, 3, 4, 5]
    assert on_their_way(network) == [2, 3, 4, 5]
    assert [member.n_pages_writing for member in store.members] == [7, 5], "the second one counts as a page"
    disk.finish()
    assert store.take_finished() == [], "the network has not the pages yet"
    network.in_flight.reverse()
    network.finish()
    disk.finish()
    assert store.take_finished() == [], "the third one has its end, and not its beginning"
    network.finish()
    assert sorted((one.ticket, one.n_pages) for one in store.take_finished()) == list(
        zip(tickets, (4, 4, 6), strict=True)
    )
    assert store.run_of_all([key_of(page) for page in range(6)]) == 6
    assert not any(member.writes or member.n_pages_writing for member in store.members)


def test_a_store_ends_with_what_is_there_if_the_one_before_it_has_failed() -> None:
    member = Member()
    store = joined(member)
    first, second = write(store, range(4)), write(store, range(6))
    assert first is not None
    assert second is not None
    member.finish()
    del member.pages[key_of(2)]
    assert wait(store, [member], second.ticket).n_pages == 2
    third = write(store, range(6))
    assert third is not None
    assert on_their_way(member) == [2, 3, 4, 5], "nothing is on its way any more"
    assert wait(store, [member], third.ticket).n_pages == 6


@pytest.mark.parametrize("drops", [lambda store: store.clear(), lambda store: store.remove(key_of(0))])
def test_pages_whose_writes_a_removal_drops_are_written_again(drops: Callable[[JoinedStore], object]) -> None:
    member = Member()
    store = joined(member)
    first = write(store, range(4))
    drops(store)
    second = write(store, range(4))
    assert first is not None
    assert second is not None
    assert on_their_way(member) == [0, 1, 2, 3] * 2
    member.finish()
    third = write(store, range(5))
    assert third is not None
    member.pages.clear()
    assert wait(store, [member], third.ticket).n_pages == 5
    assert not store.members[0].writes


@pytest.mark.parametrize("seed", range(40))
def test_random_stores_at_once(seed: int) -> None:
    """Stores with a common beginning in any number at once: no page is on its way twice, and all end."""
    random = Random(seed)
    members = [Member(is_shared=n > 0) for n in range(random.randint(1, 3))]
    store = joined(*members)
    ends: dict[int, int] = {}
    for _ in range(60):
        n_pages = random.randint(1, 30)
        if len(ends) < 6 and store.run_of_all([key_of(page) for page in range(n_pages)]) < n_pages:
            started = write(store, range(n_pages))
            assert started is not None
            ends[started.ticket] = n_pages
        elif busy := [member for member in members if member.in_flight]:
            random.choice(busy).finish()
        for member in members:
            assert len(on_their_way(member)) == len(set(on_their_way(member)))
        for finished in store.take_finished():
            n_pages = ends.pop(finished.ticket)
            assert finished.n_pages == n_pages
            assert store.run_of_all([key_of(page) for page in range(n_pages)]) == n_pages
    while ends:
        for member in members:
            if member.in_flight:
                member.finish()
        for finished in store.take_finished():
            assert ends.pop(finished.ticket) == finished.n_pages
    assert not any(member.writes or member.n_pages_writing for member in store.members)
