"""The host tier between the device's page cache and the disk: which prompts are loaded, and from where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.protocols.tiers import StoredPrefix
from radixkv.runtime.step.page_copier import PageCopier
from radixkv.runtime.tiers.copied_states import CopiedStates, ReservedState, copied_states
from radixkv.runtime.tiers.load_choice import CachedPrefixes, LoadChoice
from radixkv.runtime.tiers.storage_tier import Fetch, LentPages, Lookup, StorageTier
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer
from radixkv.runtime.tiers.tier_link import Load, Offer, StateCopy, Store, TierLink
from radixkv.settings.config import WritePolicy
from radixkv.tree.node import TOKEN_BYTES, Namespace, State
from radixkv.wire.stats import HostStats

MAX_STORED_BYTES = 512 << 20
"""See ``TierLink``. These bytes take a hundredth of a second on a GPU."""


@dataclass(slots=True, eq=False)
class HostLoad(Load[BlockTable]):
    """A load from the host tier to the device, or from what is behind it and is lent.

    ``lower`` is a lease on the host tier's pages of the same tokens.
    """

    lent: LentPages | None = None
    """The pages behind these; they are given back, and this is None, once the load is done."""
    n_lent: int = 0
    """Tokens of these."""

    @property
    def is_found(self) -> bool:
        """See ``Load``."""
        return self.lower.can_commit and (self.lent is None or self.lent.can_commit)


@dataclass(slots=True, eq=False)
class HostTier(TierLink[BlockTable, HostLoad]):
    """Keeps a copy of computed pages in the host tier, and copies them back to the device when a prompt needs them.

    The host tier is a ``PageCache`` of its own, whose pages are host slots. So neither tree ever has a page without
    its KV. A flush detaches what both trees have, also the leases of copies in flight, which then commit nothing.
    See docs/decisions/0023-tiers-are-trees.md.

    Copies take place beside the steps. The host has taken the result of every step that used their pages: pages are
    stored once they are computed, and loaded into free pages.

    Args:
        device: the cache of the KV pool.
        host: the cache of the host slots, without a slot at first; they are added as the copier has them.
        copier: copies the pages.
        disk: keeps what enters the host tier, also over restarts; None without one.
        choice: says what is loaded, and what is computed because that is faster.
        write_policy: whether to store all computed pages (``through``), or those that a second request has used
            (``selective``).
    """

    device: PageCache
    host: PageCache
    copier: PageCopier
    disk: StorageTier | None = None
    choice: LoadChoice = field(default_factory=LoadChoice)
    write_policy: WritePolicy = "through"
    n_state_pages: int = 0
    """Pages whose bytes a state of recurrent layers takes."""
    max_row_tokens: int = 0
    """Maximum tokens of a row, for which a request that loads needs window pages."""
    host_states: CopiedStates | None = field(init=False)
    """States of the host tier; None if the model has none."""
    _pages_in_store: set[int] = field(default_factory=set)
    """The device's pages that are being stored."""
    _is_growing: bool = True
    """Whether there may be more slots than were taken from the copier."""

    def __post_init__(self) -> None:
        self.upper, self._upper_part = self.device, 8
        self.upper_states = copied_states(self.device, self.n_state_pages)
        self.host_states = copied_states(self.host, self.n_state_pages)
        self._max_pages_in_store = MAX_STORED_BYTES // self.copier.page_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self._loads or self._stores) or (self.disk is not None and self.disk.is_busy)

    @property
    def delays_requests(self) -> bool:
        """Whether a copy is in flight that requests may wait for: any but a write to disk."""
        return bool(self._loads or self._stores) or (self.disk is not None and self.disk.is_fetching)

    def offer_computed(self, namespace: Namespace, tokens: bytes) -> None:
        """Offers a sequence with newly computed pages: they are stored if ``write_policy`` is ``through``. O(1)."""
        if self.write_policy == "through":
            self.offer(namespace, tokens)

    def offer_used(self, namespace: Namespace, tokens: bytes) -> None:
        """Offers a prefix that another request uses: it is stored if ``write_policy`` is ``selective``. O(1)."""
        if self.write_policy == "selective":
            self.offer(namespace, tokens)

    def match(self, namespace: Namespace, tokens: bytes) -> CachedPrefixes:
        """Returns the lengths of a prompt's cached prefixes on the device and in the host tier.

        Changes nothing. O(edges).
        """
        (n_device,) = self.device.matches([(namespace, tokens)])
        (n_host,) = self.host.matches([(namespace, tokens)])
        return CachedPrefixes(n_device, n_host)

    def match_disk(self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes) -> CachedPrefixes:
        """Returns what ``match`` has returned for the prompt, with ``n_disk`` and ``fetch_s``.

        Where several places have parts of the prompt, ``n_disk`` ends where it pays most to compute the rest.
        Changes nothing. O(1) without a disk tier or if it has no page, else O(tokens).
        """
        return self.match_all(namespace, tokens, cached)[1]

    def match_all(
        self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes
    ) -> tuple[CachedPrefixes, CachedPrefixes]:
        """Returns the same with all that can be fetched, whether that pays or not, and what ``match_disk`` returns.

        Changes nothing.
        """
        choices = self._fetchable(namespace, tokens, cached)
        return choices[0], self.choice.best(choices)

    def n_from_shared(
        self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes, *, are_lent: bool
    ) -> int | None:
        """Returns how many tokens of a fetch would come from a shared store beside the disk; None without both.

        Changes nothing. O(tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            cached: its prefixes, with what is fetched.
            are_lent: whether that is copied in place, and all of it from the store that lends it.
        """
        if self.disk is None or len(self.disk.stores) == 1:
            return None
        if are_lent:
            return cached.n_beyond_host
        return self.disk.n_from_shared(namespace, tokens, max(cached.n_host, cached.n_device), cached.n_disk)

    def _fetchable(self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes) -> list[CachedPrefixes]:
        """Returns up to where pages behind the host tier can be fetched, the longest prefix first."""
        if self.disk is None:
            return [cached]
        n_memory = max(cached.n_host, cached.n_device)
        fetchable = self.disk.fetchable(namespace, tokens, cached.n_host, n_memory)
        if not fetchable:
            return [cached._replace(n_disk=cached.n_host)]
        return [cached._replace(n_disk=n_tokens, fetch_s=fetch_s) for n_tokens, fetch_s in reversed(fetchable)]

    def stored(self, namespace: Namespace, tokens: bytes) -> StoredPrefix:
        """Returns how much of a prompt host tier and disk tier have, each from its start.

        Changes nothing. O(tokens + stores and offers).
        """
        (n_host,) = self.host.matches([(namespace, tokens)])
        is_storing = self.is_storing(namespace, tokens, n_host)
        if self.disk is None:
            return StoredPrefix(n_host, is_storing=is_storing)
        n_first, *n_others = n_stored = self.disk.n_stored(namespace, tokens)
        is_storing = is_storing or self.disk.is_storing(namespace, tokens, min(n_stored))
        return StoredPrefix(n_host, n_first, is_storing, *n_others)

    def find_fetch(
        self,
        namespace: Namespace,
        tokens: bytes,
        cached: CachedPrefixes,
        *,
        looks_up: bool = False,
        is_ahead: bool = False,
    ) -> Fetch | Lookup | None:
        """Returns a fetch from disk that the prompt should wait for: one in flight, or a new one.

        O(1) without a disk tier, else O(fetches in flight + tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            cached: what ``match`` has returned for the prompt.
            looks_up: whether to ask a store that servers share for pages that it is not known to have. Then the
                prompt may have to wait for that.
            is_ahead: whether it is not the prompt's turn yet: see ``StorageTier.begin_fetch``.
        """
        if self.disk is None:
            return None
        if (fetch := self.disk.find_load(namespace, tokens, cached.n_host)) is not None:
            return fetch
        with_all, best = self.match_all(namespace, tokens, cached)
        if looks_up and (lookup := self._look_up(namespace, tokens, best, is_ahead=is_ahead)) is not None:
            return lookup
        if not best.n_beyond_host:
            return None
        if not self.choice.should_load(best):
            if not is_ahead:
                self.choice.decline("fetch")
            return None
        fetch = self.disk.begin_fetch(
            namespace, tokens, best.n_disk, best.n_device, with_all.n_disk, is_ahead=is_ahead
        )
        if fetch is not None:
            self.choice.take("fetch")
        return fetch

    def _look_up(
        self, namespace: Namespace, tokens: bytes, known: CachedPrefixes, *, is_ahead: bool
    ) -> Lookup | None:
        """Begins a lookup, unless it is faster to do without.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            known: the best that can be fetched without.
            is_ahead: see ``find_fetch``.
        """
        assert self.disk is not None
        if self.disk.store.health is None:
            return None
        page_bytes = self.device.page_size * TOKEN_BYTES
        n_all = len(tokens) // page_bytes * self.device.page_size
        n_memory = max(known.n_host, known.n_device)
        if n_all <= n_memory:
            return None
        hoped = known._replace(n_disk=n_all, fetch_s=self.disk.fetch_s(namespace, tokens, n_memory))
        if not self.choice.should_look_up(hoped, known):
            if not is_ahead:
                self.choice.decline("lookup")
            return None
        lookup = self.disk.look_up(namespace, tokens, known.n_host)
        if lookup is not None:
            self.choice.take("lookup")
        return lookup

    def n_lendable(self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes) -> int:
        """Returns the length of a prompt's prefix that ``begin_load`` is to copy with what can be lent.

        Changes nothing. O(1) where nothing is lent, else O(loads in flight + tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            cached: what ``match`` has returned for the prompt.

        Returns:
            0 if the pages behind host tier and device cannot be copied to the device where they are, are being
            fetched, or are computed sooner.
        """
        if self.disk is None or self.disk.lender is None or not self.copier.n_mapped_slots:
            return 0
        n_tokens = self.disk.n_lendable(namespace, tokens, max(cached.n_host, cached.n_device))
        # As if the host tier had them: they take the same way from there.
        if not n_tokens or not self.choice.should_load(CachedPrefixes(cached.n_device, n_tokens)):
            return 0
        return n_tokens if self.disk.find_load(namespace, tokens, cached.n_host) is None else 0

    def begin_load(
        self,
        namespace: Namespace,
        tokens: bytes,
        n_pages: int = 0,
        n_kept: int = 0,
        *,
        ahead_of: bytes | None = None,
        n_lendable: int = 0,
    ) -> HostLoad | None:
        """Starts to copy what the host tier has of a prompt beyond the device's cached prefix, and what is lent.

        Pages are lent once there is room for them, and until the copy has ended.

        O(pages), and O(log leaves) a leaf evicted.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_pages: pages that its request needs in all, without window pages.
            n_kept: available pages that others need.
            ahead_of: None if it is the prompt's turn; else the ``NeededPrompt.key`` for which it is loaded ahead.
                Then nobody waits for the load. It takes pages that no prompt before it needs, and is neither a use
                nor a hit; the device's pages before it must be computed.
            n_lendable: what the method of this name has returned for the prompt.

        Returns:
            None if too few pages are available, there is nothing to copy, or a page cannot be lent now; the cached
            prefixes count as used.
        """
        is_ahead = ahead_of is not None
        source = self.host.open(namespace, tokens, is_use=not is_ahead, is_hit=False)
        page_size = self.device.page_size
        last = max(source.n_leased, n_lendable // page_size)
        if source.state is not None:
            tokens = tokens[: last * page_size * TOKEN_BYTES]
        blocks = self.device.open(namespace, tokens, is_use=not is_ahead, is_hit=False, needs_state=False)
        first = blocks.n_leased
        # Counted now, because the lease on the device's prefix makes its pages unavailable.
        n_missing = self.device.n_missing_beside(blocks, last, max(n_pages, last), self.max_row_tokens)
        has_room = n_missing <= self.device.n_available_to(namespace) - n_kept
        has_room = has_room and (blocks.is_computed or not is_ahead)
        reserve = (
            partial(self.device.reserve_unneeded, ahead_of=ahead_of) if is_ahead else self.device.reserve_copied
        )
        reserved = None
        if has_room and source.state is not None:
            states = self.upper_states
            assert states is not None
            assert blocks.lease is not None
            reserve_state = states.reserve_unneeded if is_ahead else states.reserve
            reserved = reserve_state(blocks.lease, source.state.n_tokens)
        has_more = last > first if self.upper_states is None else reserved is not None
        lent, n_memory = None, max(first, source.n_leased)
        may_begin = has_more and has_room and reserve(blocks, last)
        if may_begin and last > n_memory and self.disk is not None:
            lent = self.disk.lend(
                namespace, tokens, n_memory * page_size, last * page_size, self.copier.n_mapped_slots
            )
            may_begin = lent is not None
        if not may_begin:
            if reserved is not None and self.upper_states is not None:
                self.upper_states.give_back(reserved)
            self.host.close(source)
            self.device.close(blocks)
            return None
        if not is_ahead:
            self.host.count_hit(source)
            self.device.count_hit(blocks)
        self.choice.take("load")
        pages = blocks.pages[first:last]
        tokens = tokens[: last * page_size * TOKEN_BYTES]
        load = HostLoad(
            namespace,
            bytearray(tokens),
            blocks,
            source,
            first * page_size,
            pages,
            is_wanted=not is_ahead,
            lent=lent,
        )
        slots = source.pages[first:last]
        if lent is not None:
            slots += [self.copier.n_slots + slot for slot in lent.slots]
        pairs = []
        if source.state is not None and reserved is not None:
            assert self.host_states is not None
            assert self.host.tree.states is not None
            held = self.host_states.hold(source.state)
            pairs = reserved.pairs(held)
            self.host_states.let_go(held)  # the lease's block table holds it
            reserved.is_turn = source.state.is_turn
            load.state = reserved
            load.n_more = len(pairs) * self.host_states.pages_per_part
            self.host.tree.states.use(source.state)
        self._loads[self.copier.load(slots, pages, pairs)] = load
        return load

    def count_hit(self, namespace: Namespace, tokens: bytes) -> None:
        """Makes a prompt whose pages were loaded ahead a use and a hit of the host tier's pages. O(pages)."""
        self.host.close(self.host.open(namespace, tokens, needs_state=False))

    def advance(self) -> bool:
        """Takes the copies that have finished, then starts stores and writes of offered sequences.

        O(1) if nothing was offered and nothing has finished, else O(pages of a bounded number of offers).

        Returns:
            Whether a load, a fetch or a lookup has finished.
        """
        is_growing = self.copier.is_growing  # before the slots are taken: there are no more if it is False
        if new_slots := self.copier.take_new_slots():
            self.host.add_pages(new_slots)
        if new_slots or self._is_growing != is_growing:
            self._is_growing = is_growing
            self._resume_postponed()
        has_loaded = bool(self._loads or self._stores) and self._end(self._finished())
        if self._offers:
            self._start_stores()
        # After the copies, so that what they have stored is written even if no other event follows.
        return (self.disk is not None and self.disk.advance()) or has_loaded

    def invalidate(self, namespace: Namespace, tokens: bytes, *, drops_disk: bool = True) -> tuple[int, int]:
        """Drops every sequence that begins with ``tokens`` from host tier and disk tier, and from copies in flight.

        Call it once the device's pages are detached. What is offered needs no care: an offer only names tokens.

        Args:
            namespace: namespace of the sequences.
            tokens: whole pages; none for the whole namespace.
            drops_disk: False leaves what is on disk.

        Returns:
            The number of pages that the host tier, and those that the disk tier has dropped.
        """
        n_in_host, _ = self.host.invalidate(namespace, tokens)
        return n_in_host, self.disk.invalidate(namespace, tokens) if self.disk is not None and drops_disk else 0

    def flush(self) -> None:
        """Detaches everything that the host tier has, empties the disk tier, and drops the offers.

        O(nodes · log leaves + slots freed + pages on disk).
        """
        self._offers.clear()
        self._postponed.clear()
        if self.disk is not None:
            self.disk.flush()
        self.host.flush()

    def stats(self, n_loading: int, n_ahead: int, n_ahead_used: int) -> HostStats:
        """Returns the counters and gauges of the host tier. O(1).

        Args:
            n_loading: requests that wait for its pages.
            n_ahead, n_ahead_used: pages loaded ahead since the start, and those of them that were of use.
        """
        return HostStats(
            n_slots=self.host.n_pages,
            n_slots_free=self.host.n_free,
            page_bytes=self.copier.page_bytes,
            n_loading=n_loading,
            pages_loaded_total=self.counters.n_pages_loaded,
            pages_stored_total=self.counters.n_pages_stored,
            pages_evicted_total=self.host.n_evicted,
            load_seconds=self.counters.load_seconds,
            store_seconds=self.counters.store_seconds,
            copies_failed_total=self.counters.n_failed,
            loads_declined_total=self.choice.n_declined["load"],
            fetches_declined_total=self.choice.n_declined["fetch"],
            lookups_declined_total=self.choice.n_declined["lookup"],
            load_seconds_per_token=self.choice.cost.load_s_per_token,
            compute_seconds_per_token=self.choice.cost.compute_s_per_token,
            n_state_slots=self.copier.n_state_slots,
            n_state_slots_free=0 if self.host.recurrent_states is None else self.host.recurrent_states.n_free,
            pages_loaded_ahead_total=n_ahead,
            pages_loaded_ahead_used_by_waiting_total=n_ahead_used,
        )

    def check(self) -> None:
        """Checks that every host slot is in exactly one place. O(slots). Raises ``InvariantError``."""
        of_disk = () if self.disk is None else self.disk.block_tables()
        loading = (load.lower for load in self._loads.values())
        storing = (store.lower for store in self._stores.values())
        self.host.check([*of_disk, *loading, *storing])

    def descriptors(self) -> list[int]:
        """Descriptors, one of which is readable when a copy has finished."""
        stores = [] if self.disk is None else self.disk.store.descriptors()
        return [self.copier.fileno(), *stores]

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has finished, at most ``timeout_s``."""
        wait_readable(self.descriptors(), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends the copies, and frees the host memory.

        With a disk tier, what was offered is written first, as far as ``timeout_s`` allows, but not what waits for
        host memory, or for a store that is behind: it may hang.
        """
        if self.disk is not None:
            self.disk.drop_postponed()
            end = monotonic() + timeout_s
            while (self.is_busy or self._offers or self.disk.n_offers) and (left := end - monotonic()) > 0:
                self.advance()
                if self.is_busy:
                    self.wait(left)
            self.disk.close(max(0.0, end - monotonic()))
        self.copier.close()

    def _finished(self) -> Iterator[FinishedTransfer]:
        for ticket, seconds, error in self.copier.take_finished():
            copy = self._loads.get(ticket) or self._stores[ticket]
            yield FinishedTransfer(ticket, 0 if error is not None else copy.n_pages, seconds)

    def _make_room(self, offer: Offer, pages: Sequence[int]) -> tuple[BlockTable, int, int | None]:
        """See ``TierLink``.

        Slots that waiting prompts will load are not evicted for an offer, which may never be used. An offer
        whose first missing page is being stored for another one, or for which there are too few slots yet, is
        postponed until a store has finished or there are more slots.
        """
        tokens = offer.tokens
        if self.host.tree.states is not None:
            tokens = tokens[: len(pages) * self.host.page_size * TOKEN_BYTES]
        lower = self.host.open(offer.namespace, tokens, is_hit=False, needs_state=False)
        first = lower.n_leased
        n_missing = len(pages) - first
        is_being_stored = n_missing > 0 and pages[first] in self._pages_in_store
        n_needed = n_missing + (0 if self.host_states is None else self.host_states.max_pages_lost)
        if is_being_stored or (self._is_growing and n_needed > max(0, self.host.n_available_to(offer.namespace))):
            return lower, first, None
        if (states := self.host_states) is not None:
            n_available = self.host.n_available_to(offer.namespace)
            if states.n_pages_with(n_missing) > n_available:
                return lower, first, 0  # they are stored as a whole or not at all: none is evicted for some of them
        n_pages = self.host.evict_unneeded(offer.namespace, n_missing)
        has_room = self.host.reserve_copied(lower, first + n_pages)
        assert has_room, "the host tier has fewer slots than it counts as available"
        return lower, first, n_pages

    def _begin_store(self, store: Store[BlockTable]) -> int:
        self._pages_in_store.update(store.pages)
        states = []
        for source, reserved in store.states:
            assert reserved is not None
            states += [(slot, of_device) for of_device, slot in reserved.pairs(source)]
        return self.copier.store(store.pages, store.lower.pages[store.lower.n_leased :], states)

    def _reserve(self, store: Store[BlockTable], states: Sequence[State]) -> None:
        """See ``TierLink``. Where the host tier has all window pages of the tails, these are made at once."""
        lease, of_device, in_host = store.lower.lease, self.upper_states, self.host_states
        nodes = self.host.tree.states
        assert lease is not None
        assert of_device is not None
        assert in_host is not None
        assert nodes is not None
        known = {state.n_tokens for state in nodes.on_path(lease)}
        all_reserved: list[ReservedState] = []
        for state in states:
            if state.n_tokens not in known:
                reserved = in_host.reserve(lease, state.n_tokens, all_reserved, spares_waiting=True)
                if reserved is None:
                    break
                reserved.is_turn = state.is_turn
                all_reserved.append(reserved)
                store.states.append(StateCopy(of_device.hold(state), reserved))
        store.n_more = sum(len(reserved.parts) for reserved in all_reserved) * in_host.pages_per_part
        if not store.n_pages:
            for copy in store.states:
                self._offer_to_disk(store, self._attach_stored(store, copy, is_stored=True))
                of_device.let_go(copy.source)
            store.states = []

    def _take_store(self, store: Store[BlockTable], finished: FinishedTransfer) -> bool:
        self._pages_in_store.difference_update(store.pages)
        is_stored = finished.n_pages > 0 and store.blocks.can_commit
        if finished.n_pages:
            self.choice.cost.add_store(finished.n_pages * self.device.page_size, finished.seconds)
        if is_stored:
            self.host.commit_copied(store.lower, store.tokens, len(store.tokens) // TOKEN_BYTES)
            is_stored = store.lower.can_commit
        offered = [bytes(store.tokens)]
        if store.states:
            offered = [self._attach_stored(store, state, is_stored=is_stored) for state in store.states]
        if is_stored:
            for tokens in reversed(offered):
                self._offer_to_disk(store, tokens)
        return is_stored

    def _offer_to_disk(self, store: Store[BlockTable], tokens: bytes) -> None:
        if self.disk is not None:
            self.disk.offer(store.offer.namespace, tokens)

    def _attach_stored(self, store: Store[BlockTable], copy: StateCopy, *, is_stored: bool) -> bytes:
        """Puts a stored state into the host tier's tree, or frees its room; returns what to offer to the disk."""
        state, reserved, in_host = copy.source.state, copy.reserved, self.host_states
        assert reserved is not None
        assert in_host is not None
        if is_stored and store.lower.lease is not None:
            in_host.attach(reserved, store.lower.lease)
        else:
            in_host.give_back(reserved)
        return bytes(store.tokens[: state.n_tokens * TOKEN_BYTES])

    def _take_load(self, load: HostLoad, finished: FinishedTransfer) -> None:
        if finished.n_pages:
            self.choice.cost.add_load(finished.n_pages * self.device.page_size, finished.seconds)
        if load.lent is not None and self.disk is not None:
            n_lent = len(load.lent.slots) if finished.n_pages else 0
            self.disk.take_back(load.lent, n_lent, finished.seconds * n_lent / load.n_pages)
            load.n_lent = n_lent * self.device.page_size
            load.lent = None
        self.host.close(load.lower)

    def _close(self, blocks: BlockTable, lower: BlockTable, namespace: Namespace, tokens: bytes) -> None:
        """See ``TierLink``.

        Closing the lower pages counts as a use of their slots, which ends their demotion: what is demoted on the
        device is demoted there again.
        """
        n_demoted = 0 if blocks.lease is None else self.device.tree.demotions.n_at_end(blocks.lease)
        n_kept = len(blocks.pages) - n_demoted
        self.host.close(lower)
        self.device.close(blocks)
        if n_demoted:
            self.host.tree.demotions.add(namespace, tokens, n_kept * self.device.page_size)
