"""Several page stores used as one: pages are written to all of them, and read from the one that is fastest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from radixkv.runtime.tiers.fetch_rate import FetchRate
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageStore, Removal, StoreHealth

MAX_PASSED_OVER = 32
"""After so many loads that a member with pages of the prompt gave none of, its measured rate is out of date."""


@dataclass(slots=True, eq=False)
class MemberStore:
    """One of the stores, and what it has done since the start."""

    number: int
    store: PageStore
    rate: FetchRate
    n_pages_read: int = 0
    read_seconds: float = 0.0
    """Time of the reads themselves, as of ``write_seconds``."""
    write_seconds: float = 0.0
    n_pages_writing: int = 0
    """Pages of the stores in flight, and one for each store that only waits for writes of others."""
    n_passed_over: int = 0
    """Loads since its last one for whose prompts it had pages. Another member gave these, or they were computed."""
    in_flight: dict[int, _Part] = field(default_factory=dict)
    """By ticket of the store."""
    writes: dict[bytes, _Write] = field(default_factory=dict)
    """What writes each page that is on its way to the store, by key."""

    @property
    def is_stale(self) -> bool:
        """Whether its rate is out of date. Then its pages count as free until the next load measures it anew."""
        return self.n_passed_over >= MAX_PASSED_OVER

    def writes_of(self, keys: Sequence[bytes]) -> list[_Write]:
        """Returns what writes each of the leading pages that are on their way to the store. O(that number)."""
        writes: list[_Write] = []
        for key in keys:
            if (write := self.writes.get(key)) is None:
                break
            writes.append(write)
        return writes


@dataclass(slots=True, eq=False)
class _Transfer:
    """What one call has started."""

    ticket: int
    n_parts: int = 0
    """Parts that have not finished, and writes of others for which it waits."""
    n_pages: int = 0
    """As in ``FinishedTransfer``."""
    seconds: float = 0.0
    """Time of the rounds before this one."""
    round_seconds: float = 0.0
    """Longest time of the parts of this round, which take place beside each other."""
    load: _Load | None = None
    is_sum: bool = False
    """Whether each part has pages of its own."""
    keys: Sequence[bytes] = ()
    """The keys of a store's pages."""
    followed: list[MemberStore] = field(default_factory=list)
    """Members to which others were writing some of them."""


@dataclass(slots=True, eq=False)
class _Write:
    """The pages that one part of a store writes."""

    keys: Sequence[bytes]
    followers: list[_Transfer] = field(default_factory=list)
    """Stores that leave some of these pages to it, and end no sooner."""
    n_waiting: int = 0
    """Those of them that write nothing themselves to the same member, and wait for no later write than this."""


@dataclass(slots=True, eq=False)
class _Load:
    """The pages of a load."""

    keys: Sequence[bytes]
    tokens: bytes
    buffers: Sequence[memoryview]
    sources: list[int | None]
    """The number of the member that each page was read from."""
    asked: set[tuple[int, int]] = field(default_factory=set)
    """Member and page: no member is asked twice."""
    is_looked_up: bool = False
    """Whether stores that servers share were asked for what could not be read."""


class _Part(NamedTuple):
    """What one store does of a transfer."""

    transfer: _Transfer
    pages: Sequence[int]
    """Indices of the pages, for a load or a store; none for a lookup."""
    is_anew: bool = False
    """Whether its time replaces all that was measured before."""
    write: _Write | None = None
    """What a part of a store writes."""


class StartedStore(NamedTuple):
    """A store that has begun."""

    ticket: int
    are_all_in_time: bool
    """Whether all members get what they lack, and none is left out because it is behind with its writes."""
    n_new: int
    """Pages that it writes, and that were not on their way to all that lack them."""


class JoinedStore:
    """What a ``PageStore`` does, with the pages of several.

    A load takes each run of pages that the same members have from the one that is estimated to give it soonest, and
    from the first of them before anything was measured. The members read beside each other. What one of them does
    not give is asked of the others that have it, once each, and looked up where servers share a store.

    A member that gave nothing for long, because it is measured to be slow, counts as free once: so it is measured
    anew, and what it was before is forgotten.

    Args:
        stores: the stores, with pages of the same size, the one that is likely to be fastest first.
        rates: take the measured time of each store's loads.
        page_tokens: tokens of a page.
    """

    def __init__(self, stores: Sequence[PageStore], rates: Sequence[FetchRate], page_tokens: int) -> None:
        self.page_bytes = stores[0].page_bytes
        self.members = [MemberStore(number, *one) for number, one in enumerate(zip(stores, rates, strict=True))]
        self._page_tokens = page_tokens
        self._tickets = itertools.count()
        self._ended: list[FinishedTransfer] = []
        """What ``take_finished`` has not returned."""
        self._sources: dict[int, tuple[int, ...]] = {}
        """By ticket of a load that has finished, where its pages came from."""

    @property
    def n_pages(self) -> int:
        """Pages in all stores; one that two have counts twice."""
        return sum(member.store.n_pages for member in self.members)

    @property
    def health(self) -> StoreHealth | None:
        """How well the first store can be reached that several servers use; None if there is none."""
        return next((health for member in self.members if (health := member.store.health) is not None), None)

    def run(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that one store or another is known to have. O(that number)."""
        n_pages = max(member.store.run(keys) for member in self.members)
        if len(self.members) == 1:
            return n_pages
        return next((n for n in range(n_pages, len(keys)) if not self.has(keys[n])), len(keys))

    def has(self, key: bytes) -> bool:
        """See ``PageStore``. O(stores)."""
        return any(member.store.has(key) for member in self.members)

    def run_of_all(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that each store is known to have. O(that number)."""
        return min(member.store.run(keys) for member in self.members)

    def are_uneven(self, keys: Sequence[bytes]) -> bool:
        """Returns whether a store lacks leading pages that another one has. O(pages)."""
        runs = [member.store.run(keys) for member in self.members]
        return min(runs) < max(runs)

    def seconds(self, keys: Sequence[bytes], n_more: int = 0) -> list[tuple[int, float]]:
        """Returns how long loads of leading pages are estimated to take: up to each change of member, and of all.

        O(pages). Pages that no store is known to have count as those of the last one, in which they may be found.

        Args:
            keys: the pages' keys.
            n_more: pages that are read beside them, wherever the last of them comes from.

        Returns:
            Numbers of leading pages, ascending, with the seconds of their load.
        """
        n_of, seconds = [0] * len(self.members), [0.0] * len(self.members)
        estimates: list[tuple[int, float]] = []
        n_pages = 0
        for number, run in itertools.groupby(self.sources(keys)):
            n_here = sum(1 for _ in run)
            n_pages += n_here
            n_of[number] += n_here
            seconds[number] = self._seconds(number, n_of[number])
            with_more_s = self._seconds(number, n_of[number] + n_more) if n_more else seconds[number]
            estimates.append((n_pages, max(with_more_s, *seconds)))
        return estimates

    def sources(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the number of the member from which a load would read each page. O(pages).

        Pages that no store is known to have count as those of the last one, in which they may be found.
        """
        return self._choose(self._holders(keys), len(self.members) - 1)

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        """See ``PageStore``. Asks the first store that servers share."""
        for member in self.members:
            if (ticket := member.store.look_up(keys, first, states)) is not None:
                return self._start(_Transfer(next(self._tickets)), [(member, ticket, ())])
        return None

    def load(
        self,
        keys: Sequence[bytes],
        tokens: bytes,
        buffers: Sequence[memoryview],
        declined: Sequence[bytes] = (),
    ) -> int:
        """See ``PageStore``.

        Args:
            keys: see there.
            tokens: see there.
            buffers: see there.
            declined: keys of pages that are computed because reading them, too, would take longer.
        """
        load = _Load(keys, tokens, buffers, [None] * len(keys))
        transfer = _Transfer(next(self._tickets), load=load)
        holders = self._holders(keys)
        chosen = self._choose(holders)
        stale = {number for number in set(chosen) if self.members[number].is_stale}
        for number in set(chosen).union(*holders, *self._holders(declined)):
            member = self.members[number]
            member.n_passed_over = 0 if number in chosen else member.n_passed_over + 1
        self._ask(transfer, range(len(keys)), chosen, stale)
        return transfer.ticket

    def store(
        self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview], *, max_behind: int
    ) -> StartedStore | None:
        """Starts to write to each store the pages that it lacks; they count once one has them. O(pages).

        Leading pages that are on their way to a store are not written to it once more; then this ends after them.

        Args:
            keys: see ``PageStore.load``.
            tokens: see there.
            buffers: see there.
            max_behind: a member that is still writing more pages gets none of these, unless all are that lack some:
                others would have to wait for it.

        Returns:
            None if nothing was started: another member has all pages, and those that lack some are behind.
        """
        n_known = [member.store.run(keys) for member in self.members]
        lacking = [member for member in self.members if n_known[member.number] < len(keys)] or self.members[:1]
        in_time = [member for member in lacking if member.n_pages_writing <= max_behind]
        if not in_time and len(lacking) < len(self.members):
            return None
        takers, size = in_time or lacking, len(tokens) // max(1, len(keys))
        transfer = _Transfer(next(self._tickets), n_pages=max(n_known), keys=keys)
        n_new = 0
        for member in takers:
            first = n_known[member.number] % max(1, len(keys))
            before = member.writes_of(keys[first:])
            first += len(before)
            for write in dict.fromkeys(before):
                write.followers.append(transfer)
                transfer.n_parts += 1
            if before:
                transfer.followed.append(member)
            if first == len(keys):
                # It counts as a page: a member that hangs is behind before stores that wait for it stop all others.
                before[-1].n_waiting += 1
                member.n_pages_writing += 1
            else:
                pages, write = range(first, len(keys)), _Write(keys[first:])
                ticket = member.store.store(keys[first:], tokens[first * size :], buffers[first:])
                member.in_flight[ticket] = _Part(transfer, pages, write=write)
                member.writes.update(dict.fromkeys(write.keys, write))
                member.n_pages_writing += len(pages)
                transfer.n_parts += 1
                n_new = max(n_new, len(pages))
        return StartedStore(transfer.ticket, len(takers) == len(lacking), n_new)

    def is_behind(self, max_behind: int) -> bool:
        """Returns whether a member is still writing more pages than ``max_behind``. O(members)."""
        return any(member.n_pages_writing > max_behind for member in self.members)

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """See ``PageStore``. A page that two stores have counts twice."""
        self._forget_writes()
        removals = [(member, member.store.remove(key, leading)) for member in self.members]
        parts = [(member, removal.ticket, ()) for member, removal in removals]
        ticket = self._start(_Transfer(next(self._tickets), is_sum=True), parts)
        return Removal(ticket, sum(removal.n_pages for _, removal in removals))

    def clear(self) -> int:
        """See ``PageStore``."""
        self._forget_writes()
        parts = [(member, member.store.clear(), ()) for member in self.members]
        return self._start(_Transfer(next(self._tickets), is_sum=True), parts)

    def take_removed(self) -> list[bytes]:
        """See ``PageStore``. Another store may still have a page."""
        return [key for member in self.members for key in member.store.take_removed()]

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        for member in self.members:
            for finished in member.store.take_finished():
                self._end_part(member, member.in_flight.pop(finished.ticket), finished)
        ended, self._ended = self._ended, []
        return ended

    def take_sources(self, ticket: int) -> tuple[int, ...]:
        """Returns the number of the member that each leading page of a load came from, once it has finished."""
        return self._sources.pop(ticket)

    def descriptors(self) -> list[int]:
        """Descriptors, one of which is readable while ``take_finished`` has something to return or to do."""
        return [member.store.fileno() for member in self.members]

    def close(self, timeout_s: float) -> None:
        """See ``PageStore``. The stores go on beside each other until they are closed."""
        end = monotonic() + timeout_s
        for member in self.members:
            member.store.close(max(0.0, end - monotonic()))

    def _holders(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Returns the numbers of the members that are known to have each page. O(pages)."""
        if len(self.members) == 1 or self.run_of_all(keys) == len(keys):
            return [tuple(range(len(self.members)))] * len(keys)
        numbers = range(len(self.members))
        each = itertools.product((False, True), repeat=len(numbers))
        holders = {has: tuple(itertools.compress(numbers, has)) for has in each}
        return [holders[has] for has in zip(*(map(member.store.has, keys) for member in self.members), strict=True)]

    def _choose(self, holders: Sequence[tuple[int, ...]], default: int | None = None) -> list[int]:
        """Returns the number of the member that gives each page. O(pages).

        Args:
            holders: members that may give each page.
            default: the member of pages without any; None: the member of the page before.
        """
        n_of, chosen = [0] * len(self.members), list[int]()
        for numbers, run in itertools.groupby(holders):
            n_pages = sum(1 for _ in run)
            number = default
            if number is None:
                number = chosen[-1] if chosen else 0
            if len(numbers) == 1:
                number = numbers[0]
            elif numbers:
                number = self._cheapest(numbers, n_of, n_pages)
            n_of[number] += n_pages
            chosen += [number] * n_pages
        return chosen

    def _cheapest(self, numbers: Sequence[int], n_of: Sequence[int], n_pages: int) -> int:
        """Returns the number of the member that gives some more pages soonest.

        The first one, unless another one is measured to be faster; before all, one whose rate is stale.

        Args:
            numbers: of the members that have the pages.
            n_of: pages that each member gives before.
            n_pages: how many pages there are.
        """
        members = [self.members[number] for number in numbers]
        if stale := [member for member in members if member.is_stale]:
            return stale[0].number
        if not members[0].rate.is_known:
            return members[0].number

        def more_s(member: MemberStore) -> float:
            n_before = n_of[member.number]
            return self._seconds(member.number, n_before + n_pages) - self._seconds(member.number, n_before)

        return min((member for member in members if member.rate.is_known), key=more_s).number

    def _seconds(self, number: int, n_pages: int) -> float:
        """Returns how long a member is estimated to take for some pages. O(1)."""
        member = self.members[number]
        return 0.0 if member.is_stale else member.rate.seconds(n_pages * self._page_tokens)

    def _forget_writes(self) -> None:
        """Lets pages be written again whose writes a removal drops. O(pages on their way)."""
        for member in self.members:
            member.writes.clear()

    def _start(
        self,
        transfer: _Transfer,
        parts: Sequence[tuple[MemberStore, int, Sequence[int]]],
        stale: Collection[int] = (),
    ) -> int:
        """Takes note of the parts of a transfer, which have begun; returns its ticket."""
        transfer.n_parts = len(parts)
        for member, ticket, pages in parts:
            member.in_flight[ticket] = _Part(transfer, pages, member.number in stale)
        return transfer.ticket

    def _ask(
        self, transfer: _Transfer, pages: Sequence[int], chosen: Sequence[int], stale: Collection[int] = ()
    ) -> None:
        """Begins a round of a load, with a part for each member that gives pages.

        Args:
            transfer: the load's.
            pages: indices of the pages.
            chosen: the number of the member that gives each.
            stale: numbers of the members that are measured anew.
        """
        load = transfer.load
        assert load is not None
        size = len(load.tokens) // max(1, len(load.keys))
        load.asked.update(zip(chosen, pages, strict=True))
        parts = []
        for number in sorted(set(chosen)) or [0]:
            member = self.members[number]
            own = [page for page, one in zip(pages, chosen, strict=True) if one == number]
            tokens = b"".join(load.tokens[page * size : (page + 1) * size] for page in own)
            ticket = member.store.load(
                [load.keys[page] for page in own], tokens, [load.buffers[page] for page in own]
            )
            parts.append((member, ticket, own))
        self._start(transfer, parts, stale)

    def _end_part(self, member: MemberStore, part: _Part, finished: FinishedTransfer) -> None:
        """Takes note of the end of a part, and of the transfers of which it was the last one."""
        transfer, load = part.transfer, part.transfer.load
        transfer.round_seconds = max(transfer.round_seconds, finished.seconds)
        if load is not None and part.pages:
            member.n_pages_read += finished.n_pages
            member.read_seconds += finished.seconds
            if finished.n_pages:
                if part.is_anew:
                    member.rate.forget()
                member.rate.add(finished.n_pages * self._page_tokens, finished.seconds)
            for page in part.pages[: finished.n_pages]:
                load.sources[page] = member.number
        elif load is None:
            member.write_seconds += finished.seconds if part.pages else 0.0
            member.n_pages_writing -= len(part.pages)
            if transfer.is_sum:
                transfer.n_pages += finished.n_pages
            elif member not in transfer.followed:
                transfer.n_pages = max(transfer.n_pages, next(iter(part.pages), 0) + finished.n_pages)
        self._end_one(transfer)
        if part.write is not None:
            member.n_pages_writing -= part.write.n_waiting
            for key in part.write.keys:
                if member.writes.get(key) is part.write:
                    del member.writes[key]
            for follower in part.write.followers:
                self._end_one(follower)

    def _end_one(self, transfer: _Transfer) -> None:
        """Ends a transfer if this was the last of what it waits for; a load may begin another round then."""
        transfer.n_parts -= 1
        if transfer.n_parts:
            return
        load = transfer.load
        transfer.seconds += transfer.round_seconds
        transfer.round_seconds = 0.0
        if load is not None:
            missing, holders = self._still_missing(load)
            if missing:
                self._ask(transfer, missing, self._choose(holders))
                return
            if self._look_up_rest(transfer, load):
                return
            read = list(itertools.takewhile(lambda source: source is not None, load.sources))
            transfer.n_pages = len(read)
            self._sources[transfer.ticket] = tuple(source for source in read if source is not None)
        # A page that another store was to write may have failed.
        n_there = (member.store.run(transfer.keys) for member in transfer.followed)
        transfer.n_pages = max(transfer.n_pages, *n_there, 0)
        self._ended.append(FinishedTransfer(transfer.ticket, transfer.n_pages, transfer.seconds))

    def _still_missing(self, load: _Load) -> tuple[list[int], list[tuple[int, ...]]]:
        """Returns the pages that were not read and that another member may give, up to the first without one."""
        missing, holders = list[int](), list[tuple[int, ...]]()
        for page, source in enumerate(load.sources):
            if source is not None:
                continue
            others = tuple(
                member.number
                for member in self.members
                if (member.number, page) not in load.asked and member.store.has(load.keys[page])
            )
            if not others:
                break
            missing.append(page)
            holders.append(others)
        return missing, holders

    def _look_up_rest(self, transfer: _Transfer, load: _Load) -> bool:
        """Begins to look up what could not be read of a load, once; returns whether there is a member for that."""
        first = next((page for page, source in enumerate(load.sources) if source is None), None)
        if load.is_looked_up or first is None:
            return False
        load.is_looked_up = True
        for member in self.members:
            if (member.number, first) not in load.asked:
                ticket = member.store.look_up(load.keys[first:])
                if ticket is not None:
                    self._start(transfer, [(member, ticket, ())])
                    return True
        return False
