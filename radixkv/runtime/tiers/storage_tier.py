"""The disk tier, a shared store, or both: stores that keep pages of the host tier until they are fetched back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.tiers.copied_states import copied_states
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.spared_pages import SparedPages
from radixkv.runtime.tiers.storage_changes import StorageChanges
from radixkv.runtime.tiers.stored_states import StoredStates
from radixkv.runtime.tiers.stores.joined_store import JoinedStore, MemberStore
from radixkv.runtime.tiers.stores.page_keys import KeyChain, namespace_key
from radixkv.runtime.tiers.stores.page_lender import PageLender
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageStore
from radixkv.runtime.tiers.tier_link import MAX_OFFERS_PER_TURN, Load, Offer, StateCopy, Store, TierLink
from radixkv.tree.node import TOKEN_BYTES, Namespace, State
from radixkv.wire.stats import DiskStats, SharedStoreStats

_MAX_WRITTEN_BYTES = 256 << 20
"""See ``TierLink``."""
_MAX_AHEAD_BYTES = 64 << 20
"""Most bytes, or an eighth of the host tier, that are fetched at once for a prompt whose turn has not come: a fetch
for one whose turn it is shares the rate with it."""


@dataclass(slots=True)
class StoredPages:
    """Pages of a sequence in the store."""

    keys: list[bytes]
    """Keys of all whole pages of the sequence."""
    can_commit: bool = True
    """Whether they were not removed from the store."""
    has_left_out: bool = False
    """Whether a store was left out that lacks some of them, because it is behind with its writes."""


@dataclass(slots=True, eq=False)
class LentPages:
    """Pages behind the host tier that the device copies from a store's own memory, until they are given back."""

    namespace: Namespace
    tokens: bytes
    """Of all pages up to the end of these, from the start of the sequence."""
    keys: list[bytes]
    slots: list[int]
    """The store's slots that have them."""
    can_commit: bool = True
    """Whether they were not removed from the store."""


class Fetchable(NamedTuple):
    """What can be fetched of a prompt."""

    n_tokens: int
    """Length of the prompt's prefix in the host tier and the stores together."""
    fetch_s: float
    """Estimated time of the fetch."""


@dataclass(slots=True, eq=False)
class Fetch(Load[StoredPages]):
    """A copy of a sequence's pages, and of the state after them, from the stores to the host tier."""

    from_shared: Sequence[tuple[int, int]] = ()
    """Positions that came from a store that servers share, as ranges (first, last + 1), once it is done."""

    @property
    def may_be_joined(self) -> bool:
        """See ``Load``."""
        return self.blocks.can_commit and self.lower.can_commit


@dataclass(slots=True, eq=False)
class Lookup:
    """A question to a store that servers share: which pages of a sequence it has."""

    key: bytes
    """Key of the sequence's last page, by which another prompt with the same pages finds the lookup."""
    is_done: bool = False


@dataclass(slots=True, eq=False)
class StorageTier(TierLink[StoredPages, Fetch]):
    """Writes the pages that enter the host tier to page stores, and fetches them into free slots.

    With several stores, all of them get the pages, also those that were fetched from another one: see
    ``JoinedStore``. What other servers have written to a store that they share is looked up, once for each prompt.

    The store knows pages by keys, which chain over everything that a page's KV depends on. So what it holds after a
    restart matches only the same model on the same kind of device.

    Args:
        host: the cache of the host slots.
        stores: keep the pages, the one first that is likely to be fastest: see ``JoinedStore``.
        root: the key of this engine, from ``page_keys.root_key``.
        slot_buffer: returns the memory of a host slot.
        cost: takes the measured time of fetches and lookups.
        state_buffers: returns the memory of a host slot for a recurrent state, in parts of a page's size; None if
            the model has no recurrent layers.
        lender: the one of the stores whose pages the device copies in place, where no state is needed; None: none.
    """

    host: PageCache
    stores: Sequence[PageStore]
    root: bytes
    slot_buffer: Callable[[int], memoryview]
    cost: LoadCost
    state_buffers: Callable[[int], list[memoryview]] | None = None
    lender: PageLender | None = None
    n_lookups: int = 0
    """Lookups that have finished."""
    look_up_seconds: float = 0.0
    store: JoinedStore = field(init=False)
    """All stores."""
    _lookups: dict[int, Lookup] = field(default_factory=dict)
    _lent: list[LentPages] = field(default_factory=list)
    """What the lender has lent."""
    changes: StorageChanges = field(init=False)
    """Records which pages enter and leave the store, once it is told to."""
    _chain: KeyChain = field(init=False)
    _spared: SparedPages = field(init=False)
    _states: StoredStates | None = field(default=None, init=False)
    """The sequences' states; None if the model has none."""

    def __post_init__(self) -> None:
        rates = [self.cost.fetch_rate(number) for number in range(len(self.stores))]
        self.store = JoinedStore(self.stores, rates, self.host.page_size)
        page_token_bytes = self.host.page_size * TOKEN_BYTES
        self._chain = KeyChain(self.root, page_token_bytes, self.host.tree.marks)
        self._spared = SparedPages(self.stores, self._chain)
        self.changes = StorageChanges(self.store, self._chain, page_token_bytes)
        self.upper, self._upper_part = self.host, 4
        self._max_pages_in_store = _MAX_WRITTEN_BYTES // self.store.page_bytes
        n_state_pages = 0 if self.state_buffers is None else len(self.state_buffers(0))
        self.upper_states = states = copied_states(self.host, n_state_pages)
        if states is not None:
            self._states = StoredStates(self.host, states, self.store, self.state_buffers, self.slot_buffer)

    @property
    def _n_state_pages(self) -> int:
        """Most pages that are read with a state."""
        return 0 if self._states is None else self._states.n_pages

    @property
    def is_busy(self) -> bool:
        """Whether a lookup, a fetch or a write is in flight."""
        return bool(self._lookups or self._loads or self._stores)

    @property
    def is_fetching(self) -> bool:
        """Whether a lookup or a fetch is in flight."""
        return bool(self._lookups or self._loads)

    def n_stored(self, namespace: Namespace, tokens: bytes) -> list[int]:
        """Returns how much of a prompt each store has from its start, in tokens of whole pages. O(tokens)."""
        keys = self._usable_keys(namespace, tokens)
        return [self._n_known(keys, 0, store) * self.host.page_size for store in self.stores]

    def fetchable(self, namespace: Namespace, tokens: bytes, n_host: int, n_memory: int) -> list[Fetchable]:
        """Returns what can be fetched of a prompt: up to each change of the store that gives the pages, and all.

        O(tokens); O(1) if there is no page in the stores.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_host: length of its prefix in the host tier, in tokens of whole pages.
            n_memory: that of the longer one of the prefixes in the host tier and on the device. Time is estimated
                for what is behind it.

        Returns:
            The shortest one first; without more than ``n_host`` tokens none.
        """
        if not self.store.n_pages:
            return []
        page_size = self.host.page_size
        first, n_in_memory = n_host // page_size, n_memory // page_size
        keys = self._usable_keys(namespace, tokens)
        last = self._n_known(keys, first)
        found = {last: 0.0} if last > first else {}
        end = last
        for n_pages, fetch_s in reversed(self.store.seconds(keys[n_in_memory:last], self._n_state_pages)):
            if n_in_memory + n_pages < end:
                end = n_in_memory + n_pages
                if self._states is not None:
                    end = self._states.deepest(keys, end, first)
            if end > n_in_memory:
                found[end] = fetch_s  # the fetch ends there, so it takes no longer than any other up to this state
        return [Fetchable(end * page_size, found[end]) for end in sorted(found)]

    def fetch_s(self, namespace: Namespace, tokens: bytes, n_memory: int) -> float:
        """Returns the estimated time of a fetch of a prompt's pages if a shared store had those that no store is
        known to have. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_memory: see ``fetchable``.
        """
        keys = self._chain.keys(namespace, tokens)[n_memory // self.host.page_size :]
        return self.store.seconds(keys, self._n_state_pages)[-1][1] if keys else 0.0

    def n_from_shared(self, namespace: Namespace, tokens: bytes, n_memory: int, n_tokens: int) -> int:
        """Returns how many tokens of a fetch would come from stores that servers share. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_memory: tokens before those that are fetched.
            n_tokens: the fetch ends behind so many.
        """
        page_size = self.host.page_size
        keys = self._chain.keys(namespace, tokens)[n_memory // page_size : n_tokens // page_size]
        members = self.store.members
        return page_size * sum(members[one].store.health is not None for one in self.store.sources(keys))

    def look_up(self, namespace: Namespace, tokens: bytes, n_host: int) -> Lookup | None:
        """Asks a store that servers share for what it is not known to have of a prompt. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_host: length of its prefix in the host tier, in tokens of whole pages.

        Returns:
            The lookup, which may be that of another prompt with the same pages. None if there is nothing to ask.
        """
        keys = self._usable_keys(namespace, tokens)
        first = self._n_known(keys, n_host // self.host.page_size)
        if first >= len(keys):
            return None
        for lookup in self._lookups.values():
            if lookup.key == keys[-1]:
                return lookup
        ticket = self.store.look_up(keys, first, None if self._states is None else self._states.keys)
        if ticket is None:
            return None
        self._lookups[ticket] = lookup = Lookup(keys[-1])
        return lookup

    def begin_fetch(
        self,
        namespace: Namespace,
        tokens: bytes,
        n_tokens: int,
        n_device: int,
        n_found: int = 0,
        *,
        is_ahead: bool = False,
    ) -> Fetch | None:
        """Starts to read the pages of a prompt's first ``n_tokens`` that the host tier does not have. O(tokens).

        If too few slots are available, only the leading pages are read that have one; with states, those up to the
        deepest state for which there is room.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_tokens: length of its prefix in host tier and store together, up to where the fetch ends.
            n_device: length of its prefix on the device.
            n_found: length of all of that prefix, where computing its end is faster.
            is_ahead: whether it is not the prompt's turn yet. Then it takes slots that nobody needs, and only so
                many leading pages are read as have ``_MAX_AHEAD_BYTES``, where pages are of use without a state.

        Returns:
            None if there is no slot for a page that the device lacks; the cached prefix counts as used.
        """
        page_size = self.host.page_size
        declined = self._chain.keys(namespace, tokens[: n_found * TOKEN_BYTES])[n_tokens // page_size :]
        tokens = tokens[: n_tokens * TOKEN_BYTES]
        # The load that follows counts the hit.
        blocks = self.host.open(namespace, tokens, is_use=not is_ahead, is_hit=False, needs_state=False)
        first = blocks.n_leased
        n_available = max(0, self.host.n_available_to(namespace))
        last, state = min(n_tokens // page_size, first + n_available), None
        if is_ahead and self.upper_states is None:
            last = min(last, first + max(1, min(_MAX_AHEAD_BYTES // self.store.page_bytes, self.host.n_pages // 8)))
        n_least = max(first, n_device // page_size)
        if (states := self.upper_states) is not None:
            (n_host,) = self.host.matches([(namespace, tokens)])  # it may have more pages, without a state
            n_least = max(n_host, n_device) // page_size
            assert self._states is not None
            keys = self._chain.keys(namespace, tokens)
            last, state = self._states.reserve(blocks, keys, n_least, n_available, is_ahead=is_ahead)
            if last < first:
                self.host.close(blocks)
                whole = tokens[: last * page_size * TOKEN_BYTES]
                blocks = self.host.open(namespace, whole, is_use=not is_ahead, is_hit=False, needs_state=False)
                first = blocks.n_leased
        reserve = self.host.reserve_unneeded if is_ahead else self.host.reserve_copied
        has_room = last > n_least and (blocks.is_computed or not is_ahead)
        if not has_room or not reserve(blocks, last):
            if state is not None and states is not None:
                states.give_back(state)
            self.host.close(blocks)
            return None
        tokens = tokens[: last * page_size * TOKEN_BYTES]
        lower = StoredPages(self._chain.keys(namespace, tokens))
        parts = {} if state is None else state.parts
        n_more = 0 if states is None else len(parts) * states.pages_per_part
        pages = blocks.pages[first:last]
        fetch = Fetch(namespace, bytearray(tokens), blocks, lower, first * page_size, pages, state, n_more)
        self._loads[self.store.load(*self._pages(fetch, parts), declined)] = fetch
        return fetch

    def n_lendable(self, namespace: Namespace, tokens: bytes, n_memory: int) -> int:
        """Returns the length of a prompt's prefix that can be copied to the device without a fetch.

        O(tokens), and O(1) beside their keys if there is more than can be lent.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_memory: see ``fetchable``.

        Returns:
            0 if the lender has not all that the stores have behind ``n_memory``, or has more of it than it can lend
            now, or if a state must come with it.
        """
        if self.lender is None or self.upper_states is not None:
            return 0
        keys = self._chain.keys(namespace, tokens)[n_memory // self.host.page_size :]
        n_most = self.lender.n_lendable
        if any(map(self.store.has, keys[n_most : n_most + 1])):
            return 0
        n_pages = self.lender.run(keys[:n_most])
        if not n_pages or any(map(self.store.has, keys[n_pages : n_pages + 1])):
            return 0
        return n_memory + n_pages * self.host.page_size

    def lend(
        self, namespace: Namespace, tokens: bytes, n_memory: int, n_tokens: int, n_usable: int
    ) -> LentPages | None:
        """Lends the pages of a prompt between two lengths; ``take_back`` ends the loan. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_memory: tokens before the pages.
            n_tokens: what ``n_lendable`` has returned.
            n_usable: leading slots of the lender that can be copied.

        Returns:
            None if one of the pages cannot be lent now.
        """
        assert self.lender is not None
        first, tokens = n_memory // self.host.page_size, tokens[: n_tokens * TOKEN_BYTES]
        keys = self._chain.keys(namespace, tokens)[first:]
        slots = self.lender.lend(keys, tokens[n_memory * TOKEN_BYTES :], n_usable)
        if slots is None:
            return None
        self._lent.append(lent := LentPages(namespace, tokens, keys, slots))
        return lent

    def take_back(self, lent: LentPages, n_pages: int, seconds: float) -> None:
        """Ends a loan, and counts what was copied of it as fetched. O(pages).

        Args:
            lent: the pages.
            n_pages: how many of them were copied.
            seconds: how long that took.
        """
        assert self.lender is not None
        self._lent.remove(lent)
        self.lender.give_back(lent.keys, lent.slots)
        member = next(member for member in self.store.members if member.store is self.lender)
        member.n_pages_read += n_pages
        member.read_seconds += seconds
        if n_pages:
            self.changes.add_stored(lent.namespace, lent.tokens)

    def advance(self) -> bool:
        """Takes the transfers that have finished, then starts writes of offered sequences.

        O(1) if nothing was offered and nothing has finished, else O(tokens of a bounded number of offers).

        Returns:
            Whether a lookup or a fetch has finished.
        """
        finished = self.store.take_finished()
        has_looked_up = sum(map(self._end_look_up, finished)) > 0
        has_fetched = self._end(finished)
        if self._offers:
            self._spared.spare(self.host.upcoming_prompts())
            self._start_stores()
        self._start_postponed()
        return has_looked_up or has_fetched

    def invalidate(self, namespace: Namespace, tokens: bytes) -> int:
        """Removes every sequence that begins with ``tokens`` from the store, and those that are on their way.

        Pages of ``tokens`` itself are removed as by ``RadixTree.detach``. Call this after the host tier's are
        detached: the store drops all writes, and those whose pages the host tier still has begin again.
        O(pages in the store).

        Args:
            namespace: namespace of the sequences.
            tokens: whole pages; none for the whole namespace.

        Returns:
            The number of pages removed. The states along ``tokens`` are removed, too: other sequences that share
            the pages before them compute these again.
        """
        for fetch in self._loads.values():
            if _is_related(fetch, namespace, tokens):
                fetch.lower.can_commit = False
        for lent in self._lent:
            if _is_related(lent, namespace, tokens):
                lent.can_commit = False
        *leading, key = namespace_key(self.root, namespace), *self._chain.keys(namespace, tokens)
        n_state_pages = 0
        if tokens and self._states is not None:
            n_state_pages = sum(map(self._states.remove, (*leading[1:], key)))
        removal = self.store.remove(key, leading[1:])
        for write in self._stores.values():
            if write.blocks.can_commit:
                self.offer(*write.offer)
        return removal.n_pages + n_state_pages

    def flush(self) -> None:
        """Removes all pages from the store, also those of other models, unless servers share it. O(its pages)."""
        self._offers.clear()
        self._postponed.clear()
        self.store.clear()

    def stats(self) -> tuple[DiskStats | None, DiskStats | None]:
        """Returns the counters and gauges of the disk tier, and those of the shared store. O(1)."""
        by_kind = {member.store.health is None: self._stats_of(member) for member in self.store.members}
        return by_kind.get(True), by_kind.get(False)

    def _stats_of(self, member: MemberStore) -> DiskStats:
        shared, store = None, member.store
        if (health := store.health) is not None:
            shared = SharedStoreStats(
                is_away=health.is_away,
                failures_total=health.n_failures,
                lookups_total=self.n_lookups,
                look_up_seconds=self.look_up_seconds,
            )
        return DiskStats(
            n_pages=store.n_pages,
            n_bytes=store.n_bytes,
            pages_fetched_total=member.n_pages_read,
            pages_written_total=store.counts.n_written,
            pages_lost_total=store.counts.n_lost,
            fetch_seconds=member.read_seconds,
            write_seconds=member.write_seconds,
            fetch_seconds_per_token=member.rate.s_per_token,
            shared=shared,
        )

    def drop_postponed(self) -> None:
        """Leaves out for good what a store was left out of because it is behind. O(1)."""
        self._postponed.clear()

    def close(self, timeout_s: float) -> None:
        """Finishes the writes that were offered as far as ``timeout_s`` allows, and drops the rest."""
        self.store.close(timeout_s)

    def _make_room(self, offer: Offer, pages: Sequence[int]) -> tuple[StoredPages, int, int]:
        """See ``TierLink``: the store makes room for itself."""
        tokens = offer.tokens[: len(pages) * self.host.page_size * TOKEN_BYTES]
        keys = self._chain.keys(offer.namespace, tokens)
        first = self.store.run_of_all(keys)
        return StoredPages(keys), first, len(pages) - first

    def _reserve(self, store: Store[StoredPages], states: Sequence[State]) -> None:
        """See ``TierLink``. The state at the end is written: each of the others was offered with its own prefix."""
        assert self.upper_states is not None
        assert self._states is not None
        held, keys, are_everywhere = (
            self.upper_states.hold(states[0]),
            store.lower.keys,
            self._states.are_everywhere,
        )
        held.parts = {entry: part for entry, part in held.parts.items() if not are_everywhere(keys[entry])}
        if not held.parts and not store.pages:
            self.upper_states.let_go(held)
            return
        store.states = [StateCopy(held, None)]
        store.n_more = len(held.parts) * self.upper_states.pages_per_part

    def _begin_store(self, store: Store[StoredPages]) -> int | None:
        """See ``TierLink``. A store that is behind is left out, and gets the pages later."""
        parts = store.states[0].source.parts if store.states else {}
        started = self.store.store(*self._pages(store, parts), max_behind=self._max_behind)
        if started is None:
            return None
        store.lower.has_left_out = not started.are_all_in_time
        # One that writes nothing itself counts as a page, so that there are not more and more of them.
        store.n_counted = max(1, started.n_new)
        return started.ticket

    @property
    def _max_behind(self) -> int:
        """A store that is writing more pages is behind: the others would have to wait for it."""
        return self._max_in_store // 2

    def _resume_postponed(self) -> None:
        """See ``TierLink``. Only ``_start_postponed`` knows when a store is not behind any more."""

    def _start_postponed(self) -> None:
        """Offers again, oldest first, what a store was left out of, as long as none is behind.

        O(tokens of a bounded number of offers). Pages that the host tier has lost since are left out for good.
        """
        for _ in range(min(MAX_OFFERS_PER_TURN, len(self._postponed))):
            if self._n_pages_in_store >= self._max_in_store or self.store.is_behind(self._max_behind):
                break
            self._start_store(self._postponed.pop())

    def _take_store(self, store: Store[StoredPages], finished: FinishedTransfer) -> bool:
        if store.lower.has_left_out and store.blocks.can_commit:
            offer = store.offer._replace(on_stored=None)
            if self._states is None:  # with states each offer has the one at its own end
                self._postponed.drop_beginnings(offer)
            self._postponed.add(offer)
        self.changes.add_stored(store.offer.namespace, store.offer.tokens)
        return finished.n_pages == store.n_pages

    def _take_load(self, load: Fetch, finished: FinishedTransfer) -> None:
        load.from_shared = list(self._ranges_from_shared(load, self.store.take_sources(finished.ticket)))
        self.changes.add_stored(load.namespace, bytes(load.tokens))
        read = bytes(load.tokens[: (load.start + load.n_tokens) * TOKEN_BYTES])
        copied = [self._chain.keys(load.namespace, read)]
        if load.state is not None and self._states is not None:
            copied += [self._states.keys.all(load.lower.keys[entry]) for entry in load.state.parts]
        if load.n_tokens and any(map(self.store.are_uneven, copied)):
            self.offer(load.namespace, read)  # once the host tier has them

    def _ranges_from_shared(self, load: Fetch, sources: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the ranges of a fetch's positions that came from stores that servers share.

        Args:
            load: the fetch.
            sources: numbers of the stores of its leading pages, with those of its state.
        """
        are_shared = [self.store.members[source].store.health is not None for source in sources]
        start = load.start
        for is_shared, run in groupby(are_shared[: load.n_tokens // self.host.page_size]):
            end = start + len(list(run)) * self.host.page_size
            if is_shared:
                yield start, end
            start = end

    def _close(self, blocks: BlockTable, lower: StoredPages, namespace: Namespace, tokens: bytes) -> None:
        self.host.close(blocks)

    def _pages(
        self, copy: Fetch | Store[StoredPages], parts: Mapping[int, int]
    ) -> tuple[list[bytes], bytes, list[memoryview]]:
        """Returns keys, tokens and memory of the pages that are copied, with those of parts of a state."""
        first = len(copy.lower.keys) - len(copy.pages)
        keys, buffers = copy.lower.keys[first:], [self.slot_buffer(slot) for slot in copy.pages]
        tokens = bytes(copy.tokens[first * self.host.page_size * TOKEN_BYTES :])
        if self._states is None:
            return keys, tokens, buffers
        more_keys, more_tokens, more_buffers = self._states.pages(copy.lower.keys, parts)
        return keys + more_keys, tokens + more_tokens, buffers + more_buffers

    def _usable_keys(self, namespace: Namespace, tokens: bytes) -> list[bytes]:
        """Returns the keys of a prompt's pages that can be of use: with states, up to where the last one may be."""
        keys = self._chain.keys(namespace, tokens)
        return keys if self._states is None else keys[: self._states.n_usable(len(tokens) // TOKEN_BYTES)]

    def _n_known(self, keys: Sequence[bytes], first: int, store: PageStore | None = None) -> int:
        """Returns how many leading pages can be had of those that host tier and stores are known to have.

        Asks only for those behind the host tier's. Nothing counts that as a use, so the stores do not take them for
        newer than the pages before them. The load that follows uses all of them.

        Args:
            keys: of the pages of a prompt that can be of use.
            first: pages that the host tier has.
            store: the only store that counts; None: all do.
        """
        last = first + (store or self.store).run(keys[first:])
        return last if self._states is None else self._states.deepest(keys, last, first, store)

    def _end_look_up(self, finished: FinishedTransfer) -> bool:
        """Ends a lookup; returns False if it is none."""
        if (lookup := self._lookups.pop(finished.ticket, None)) is None:
            return False
        lookup.is_done = True
        self.n_lookups += 1
        self.look_up_seconds += finished.seconds
        self.cost.add_look_up(finished.seconds)
        return True


def _is_related(copy: Fetch | LentPages, namespace: Namespace, tokens: bytes) -> bool:
    """Returns whether a copy's sequence begins with ``tokens``, or is the beginning of them."""
    return copy.namespace == namespace and (copy.tokens.startswith(tokens) or tokens.startswith(copy.tokens))
