"""Transfers between the device's page cache and the host tier's: which pages are copied, when, and for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.step.page_copier import FinishedCopy, PageCopier
from radixkv.runtime.tiers.disk_tier import DiskTier, Fetch, Lookup
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.tier_copies import CachedPrefixes, Load, Offer
from radixkv.settings.config import LoadPolicy, WritePolicy
from radixkv.tree.node import TOKEN_BYTES, Namespace

MAX_STORED_BYTES = 512 << 20
"""No store begins while so many bytes, or 1/8 of the pool, are being stored: their pages cannot be evicted
meanwhile. The last store may exceed it. These bytes take a hundredth of a second on a GPU."""
MAX_OFFERS = 4096
"""Offers that wait for their copy; beyond them the oldest is dropped. A later request for the same tokens offers
them again."""
_MAX_DECLINED = 32
"""After so many prompts that are computed because that is faster, one is loaded, to measure its rate anew. As many
are not fetched from disk before one is, or not looked up in a shared store."""
_MAX_OFFERS_PER_TURN = 32
"""Offers looked at in one turn, which bounds its length: a batch of requests may offer all its prompts at once."""


@dataclass(slots=True, eq=False)
class _Store:
    """A copy of a sequence's pages from the device to the host tier."""

    tokens: bytearray
    source: BlockTable
    """Lease on the device's pages."""
    blocks: BlockTable
    """Host slots: a lease on those that the tier had, then those to fill."""
    pages: frozenset[int]
    """The device's pages that are copied."""
    offer: Offer
    """The offer that asked for the copy."""


@dataclass(slots=True)
class TransferCounters:
    """What the transfers have done since the start."""

    n_loads: int = 0
    n_pages_loaded: int = 0
    load_seconds: float = 0.0
    """Time of the copies themselves, as of ``store_seconds``."""
    n_pages_stored: int = 0
    store_seconds: float = 0.0
    n_failed: int = 0
    """Loads and stores whose copy failed."""
    n_computed: int = 0
    """Admissions that compute tokens which the host tier has, because loading them would take longer."""


@dataclass(slots=True, eq=False)
class Transfers:
    """Keeps a copy of computed pages in the host tier, and copies them back to the device when a prompt needs them.

    The host tier is a ``PageCache`` of its own, whose pages are host slots. So neither tree ever has a page without
    its KV: the pages of a copy are private to a block table until the copy has finished, and only then are they
    committed to the tree. A flush detaches what both trees have, also the leases of copies in flight, which then
    commit nothing. See docs/decisions/0023-tiers-are-trees.md.

    Copies take place beside the steps. The host has taken the result of every step that used their pages: pages are
    stored once they are computed, and loaded into free pages.

    Args:
        device: the cache of the KV pool.
        host: the cache of the host slots, without a slot at first; they are added as the copier has them.
        copier: copies the pages.
        disk: keeps what enters the host tier, also over restarts; None without one.
        load_policy: whether to load (``always``), to compute (``never``), or to do what is faster (``auto``).
        write_policy: whether to store all computed pages (``through``), or those that a second request has used
            (``selective``).
        cost: estimates whether loading or computing is faster.
    """

    device: PageCache
    host: PageCache
    copier: PageCopier
    disk: DiskTier | None = None
    load_policy: LoadPolicy = "auto"
    write_policy: WritePolicy = "through"
    cost: LoadCost = field(default_factory=LoadCost)
    counters: TransferCounters = field(default_factory=TransferCounters)
    _n_declined: int = 0
    """Prompts computed since the last load because that is faster."""
    _n_fetches_declined: int = 0
    """Prompts that were not fetched from disk since the last fetch because computing is faster."""
    _n_lookups_declined: int = 0
    """Prompts that were not looked up in a shared store since the last lookup because computing is faster."""
    _offers: deque[Offer] = field(default_factory=deque)
    _postponed: deque[Offer] = field(default_factory=deque)
    """Offers whose next page is being stored for another one, or that wait for slots whose memory is not ready."""
    _loads: dict[int, Load] = field(default_factory=dict)
    """Loads in flight, by ticket."""
    _stores: dict[int, _Store] = field(default_factory=dict)
    """Stores in flight, by ticket."""
    _pages_in_store: set[int] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self._loads or self._stores) or (self.disk is not None and self.disk.is_busy)

    @property
    def delays_requests(self) -> bool:
        """Whether a copy is in flight that requests may wait for: any but a write to disk."""
        return bool(self._loads or self._stores) or (self.disk is not None and self.disk.is_fetching)

    @property
    def n_offers(self) -> int:
        """Offers that wait for their copy."""
        return len(self._offers) + len(self._postponed)

    def block_tables(self) -> Iterator[BlockTable]:
        """Yields the device's block tables that belong to copies in flight and to no waiting request."""
        for load in self._loads.values():
            if not load.is_wanted:
                yield load.blocks
        for store in self._stores.values():
            yield store.source

    def host_block_tables(self) -> Iterator[BlockTable]:
        """Yields the host tier's block tables of all copies in flight."""
        if self.disk is not None:
            yield from self.disk.block_tables()
        for load in self._loads.values():
            yield load.source
        for store in self._stores.values():
            yield store.blocks

    def offer_computed(self, namespace: Namespace, tokens: bytes) -> None:
        """Offers a sequence with newly computed pages: they are stored if ``write_policy`` is ``through``. O(1)."""
        if self.write_policy == "through":
            self.offer(namespace, tokens)

    def offer_used(self, namespace: Namespace, tokens: bytes) -> None:
        """Offers a prefix that another request uses: it is stored if ``write_policy`` is ``selective``. O(1)."""
        if self.write_policy == "selective":
            self.offer(namespace, tokens)

    def offer(
        self, namespace: Namespace, tokens: bytes, on_stored: Callable[[Namespace, bytes], None] | None = None
    ) -> None:
        """Queues a sequence, so that its computed pages are copied to the host tier. O(1) beside the tokens' copy.

        Args:
            namespace: namespace of the sequence.
            tokens: the sequence; a last page that they do not fill is left out.
            on_stored: called with both once the host tier has the pages that are computed, or the leading ones for
                which it has room; not if that fails.
        """
        if self.n_offers == MAX_OFFERS:
            (self._postponed or self._offers).popleft()
        self._offers.append(Offer(namespace, tokens, on_stored))

    def match(self, namespace: Namespace, tokens: bytes) -> CachedPrefixes:
        """Returns the lengths of a prompt's cached prefixes on the device and in the host tier.

        Changes nothing. O(edges).
        """
        (n_device,) = self.device.matches([(namespace, tokens)])
        (n_host,) = self.host.matches([(namespace, tokens)])
        return CachedPrefixes(n_device, n_host)

    def match_disk(self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes) -> CachedPrefixes:
        """Returns what ``match`` has returned for the prompt, with ``n_disk``.

        Changes nothing. O(1) without a disk tier or if it has no page, else O(tokens).
        """
        if self.disk is None:
            return cached
        return cached._replace(n_disk=self.disk.n_fetchable(namespace, tokens, cached.n_host))

    def should_load(self, cached: CachedPrefixes) -> bool:
        """Returns whether to load what other tiers have beyond the device, rather than compute it. O(1)."""
        n_host, n_disk = cached.n_beyond_device, cached.n_beyond_host
        if not n_host + n_disk or self.load_policy == "never":
            return False
        n_declined = self._n_fetches_declined if n_disk else self._n_declined
        return (
            self.load_policy == "always" or n_declined >= _MAX_DECLINED or self.cost.is_load_faster(n_host, n_disk)
        )

    def count_declined(self) -> None:
        """Counts a prompt that is computed because that is faster. O(1)."""
        self.counters.n_computed += 1
        self._n_declined += 1

    def find_fetch(
        self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes, *, looks_up: bool = False
    ) -> Fetch | Lookup | None:
        """Returns a fetch from disk that the prompt should wait for: one in flight, or a new one.

        O(1) without a disk tier, else O(fetches in flight + tokens).

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            cached: what ``match`` has returned for the prompt.
            looks_up: whether to ask a store that servers share for pages that it is not known to have. Then the
                prompt may have to wait for that.
        """
        if self.disk is None:
            return None
        if (fetch := self.disk.find_fetch(namespace, tokens, cached.n_host)) is not None:
            return fetch
        if looks_up and (lookup := self._look_up(namespace, tokens, cached)) is not None:
            return lookup
        cached = self.match_disk(namespace, tokens, cached)
        if not cached.n_beyond_host:
            return None
        if not self.should_load(cached):
            self._n_fetches_declined += 1
            return None
        fetch = self.disk.begin_fetch(namespace, tokens, cached.n_disk, cached.n_device)
        if fetch is not None:
            self._n_fetches_declined = 0
        return fetch

    def _look_up(self, namespace: Namespace, tokens: bytes, cached: CachedPrefixes) -> Lookup | None:
        """Begins a lookup, unless computing the whole prompt is faster than to look it up, fetch it and load it."""
        assert self.disk is not None
        if self.disk.store.health is None or self.load_policy == "never":
            return None
        page_bytes = self.device.page_size * TOKEN_BYTES
        best = cached._replace(n_disk=len(tokens) // page_bytes * self.device.page_size)
        if not best.n_beyond_host:
            return None
        if not (
            self.load_policy == "always"
            or self._n_lookups_declined >= _MAX_DECLINED
            or self.cost.is_load_faster(best.n_beyond_device, best.n_beyond_host, looks_up=True)
        ):
            self._n_lookups_declined += 1
            return None
        lookup = self.disk.look_up(namespace, tokens, cached.n_host)
        if lookup is not None:
            self._n_lookups_declined = 0
        return lookup

    def find_load(self, namespace: Namespace, tokens: bytes, n_device: int) -> Load | None:
        """Returns a load in flight that copies the page of the prompt after those on the device, if there is one.

        O(loads in flight), and a comparison of the tokens.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_device: length of its prefix on the device, in tokens.
        """
        n_bytes = (n_device + self.device.page_size) * TOKEN_BYTES
        for load in self._loads.values():
            lease = load.source.lease
            is_same_namespace = lease is not None and lease.namespace == namespace and not lease.detached
            if is_same_namespace and n_bytes <= len(load.tokens) and tokens[:n_bytes] == load.tokens[:n_bytes]:
                return load
        return None

    def begin_load(self, namespace: Namespace, tokens: bytes, n_pages: int = 0, n_kept: int = 0) -> Load | None:
        """Starts to copy what the host tier has of a prompt beyond the device's cached prefix.

        O(pages), and O(log leaves) a leaf evicted.

        Args:
            namespace: the prompt's.
            tokens: the prompt.
            n_pages: pages that its request needs in all.
            n_kept: available pages that others need.

        Returns:
            None if too few pages are available or there is nothing to copy; the cached prefixes count as used.
        """
        source = self.host.open(namespace, tokens, is_hit=False)
        blocks = self.device.open(namespace, tokens, is_hit=False)
        first, last = blocks.n_leased, source.n_leased
        # Counted now, because the lease on the device's prefix makes its pages unavailable.
        has_room = max(n_pages, last) - first <= self.device.n_available_to(namespace) - n_kept
        if last <= first or not has_room or not self.device.reserve(blocks, last):
            self.host.close(source)
            self.device.close(blocks)
            return None
        self.host.count_hit(source)
        self.device.count_hit(blocks)
        n_bytes = last * self.device.page_size * TOKEN_BYTES
        self._n_declined = 0
        load = Load(bytearray(tokens[:n_bytes]), blocks, source, last - first)
        self._loads[self.copier.load(source.pages[first:last], blocks.pages[first:last])] = load
        return load

    def leave(self, load: Load) -> None:
        """Gives up a load. Its pages stay cached if the copy succeeds; if not, they are free then. O(pages)."""
        load.is_wanted = False
        if load.is_done:
            self.device.close(load.blocks)

    def advance(self) -> bool:
        """Takes the copies that have finished, then starts stores of offered sequences.

        O(1) if nothing was offered and nothing has finished, else O(pages of a bounded number of offers).

        Returns:
            Whether a load or a fetch has finished.
        """
        if new_slots := self.copier.take_new_slots():
            self.host.add_pages(new_slots)
            self._resume_postponed()
        has_loaded = False
        if self._loads or self._stores:
            for finished in self.copier.take_finished():
                if (load := self._loads.pop(finished.ticket, None)) is not None:
                    self._end_load(load, finished)
                    has_loaded = True
                else:
                    self._end_store(self._stores.pop(finished.ticket), finished)
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

    def check(self) -> None:
        """Checks that every host slot is in exactly one place. O(slots). Raises ``InvariantError``."""
        self.host.check(self.host_block_tables())

    def descriptors(self) -> list[int]:
        """Descriptors of which one is readable when a copy has finished."""
        store = [] if self.disk is None else [self.disk.store.fileno()]
        return [self.copier.fileno(), *store]

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has finished, at most ``timeout_s``."""
        wait_readable(self.descriptors(), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends the copies, and frees the host memory.

        With a disk tier, what was offered is written first, as far as ``timeout_s`` allows, but not what waits for
        host memory.
        """
        if self.disk is not None:
            end = monotonic() + timeout_s
            while (self.is_busy or self._offers or self.disk.n_offers) and (left := end - monotonic()) > 0:
                self.advance()
                if self.is_busy:
                    self.wait(left)
            self.disk.close(max(0.0, end - monotonic()))
        self.copier.close()

    def _end_load(self, load: Load, finished: FinishedCopy) -> None:
        load.is_done, load.has_failed = True, finished.error is not None
        load.is_lost = load.has_failed or not load.source.can_commit
        self.counters.load_seconds += finished.seconds
        if load.has_failed:
            self.counters.n_failed += 1
        else:
            self.counters.n_loads += 1
            self.counters.n_pages_loaded += load.n_pages
            self.cost.add_load(load.n_pages * self.device.page_size, finished.seconds)
        if not load.is_lost:
            self.device.commit_copied(load.blocks, load.tokens, len(load.tokens) // TOKEN_BYTES)
        self.host.close(load.source)
        if not load.is_wanted:
            self.device.close(load.blocks)

    def _end_store(self, store: _Store, finished: FinishedCopy) -> None:
        self.counters.store_seconds += finished.seconds
        if finished.error is None:
            self.counters.n_pages_stored += len(store.pages)
            self.cost.add_store(len(store.pages) * self.device.page_size, finished.seconds)
            if store.source.can_commit:
                self.host.commit_copied(store.blocks, store.tokens, len(store.tokens) // TOKEN_BYTES)
                if store.blocks.can_commit:
                    _stored(store.offer)
                    if self.disk is not None:
                        self.disk.offer(store.offer.namespace, bytes(store.tokens))
        else:
            self.counters.n_failed += 1
        self._pages_in_store -= store.pages
        self._resume_postponed()
        self._close_both(store.source, store.blocks, store.offer.namespace, bytes(store.tokens))

    def _resume_postponed(self) -> None:
        self._offers.extendleft(reversed(self._postponed))
        self._postponed.clear()

    def _start_stores(self) -> None:
        """Starts stores of offers, oldest first, as long as few enough pages are in flight."""
        max_pages = max(1, min(MAX_STORED_BYTES // self.copier.page_bytes, self.device.n_pages // 8))
        for _ in range(min(_MAX_OFFERS_PER_TURN, len(self._offers))):
            if len(self._pages_in_store) >= max_pages:
                break
            self._start_store(self._offers.popleft())

    def _start_store(self, offer: Offer) -> None:
        """Starts the store of what the host tier lacks of an offer: of the leading pages for which it has room.

        What waiting prompts will load is not evicted for that: it will be used, and nobody knows that of an offer.
        An offer whose first missing page is being stored for another one, or for which there are too few slots yet,
        is postponed until a store has finished or there are more slots.
        """
        page_size = self.device.page_size
        source = self.device.open(offer.namespace, offer.tokens, is_use=False)
        blocks = self.host.open(offer.namespace, offer.tokens, is_hit=False)
        first, end = blocks.n_leased, self.device.n_computed(source) // page_size
        is_being_stored = first < end and source.pages[first] in self._pages_in_store
        is_growing = self.host.n_pages < self.copier.n_slots
        waits_for_slots = is_growing and end - first > max(0, self.host.n_available_to(offer.namespace))
        is_postponed = is_being_stored or waits_for_slots
        n_stored = 0 if is_postponed else self.host.make_room(offer.namespace, end - first)
        if not n_stored:
            self._close_both(source, blocks, offer.namespace, offer.tokens)
            if is_postponed:
                self._postponed.append(offer)
            else:
                _stored(offer)
            return
        last = first + n_stored
        has_room = self.host.reserve(blocks, last)
        assert has_room, "the host tier has fewer slots than it counts as available"
        pages = source.pages[first:last]
        tokens = bytearray(offer.tokens[: last * page_size * TOKEN_BYTES])
        store = _Store(tokens, source, blocks, frozenset(pages), offer)
        self._pages_in_store |= store.pages
        self._stores[self.copier.store(pages, blocks.pages[first:last])] = store

    def _close_both(self, source: BlockTable, blocks: BlockTable, namespace: Namespace, tokens: bytes) -> None:
        """Closes a store's block tables on the device and in the host tier.

        Closing the host's counts as a use of its slots, which ends their demotion: what is demoted on the device is
        demoted there again.
        """
        n_demoted = self.device.n_demoted(source)
        n_kept = len(source.pages) - n_demoted
        self.host.close(blocks)
        self.device.close(source)
        if n_demoted:
            self.host.demote(namespace, tokens, n_kept * self.device.page_size)


def _stored(offer: Offer) -> None:
    """Tells whoever made an offer that the host tier has its pages."""
    if offer.on_stored is not None:
        offer.on_stored(offer.namespace, offer.tokens)
