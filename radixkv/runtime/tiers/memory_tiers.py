"""The memory tiers of a server: which requests wait for pages from them, and what is offered to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.returns import NeededPrompt
from radixkv.runtime.protocols.tiers import AwaitedPages, StoredPrefix, TierChanges, TierHits, Tiers
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.tiers.host_tier import HostLoad, HostTier
from radixkv.runtime.tiers.load_ahead import LoadAhead
from radixkv.runtime.tiers.load_choice import CachedPrefixes
from radixkv.runtime.tiers.storage_tier import Fetch, Lookup
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.tree.spared import WaitingPrompt
from radixkv.wire.cache_messages import Tier
from radixkv.wire.stats import DiskStats, HostStats
from radixkv.wire.table_messages import LoadStage

_OFFERED_TOKENS = 256
"""A decoding request offers its new pages whenever it has this many new tokens, so a preemption loses fewer."""


class _Loading(NamedTuple):
    load: HostLoad
    n_missing: int
    """Pages that the request needs beside the loaded ones, with those in whose place its window pages will be."""


@dataclass(slots=True)
class _Wait:
    """How a request has waited for pages."""

    began_at: float
    """When it first began, on the clock."""
    ended_at: float | None = None
    """When the last of its pages had come; None while it waits. Waits after its first step do not count."""
    n_fetchable_bytes: int | None = None
    """Bytes of the prompt's tokens that may be fetched from disk; None for all. A fetch that has failed leaves what
    it has read, and less than it was to read, so that it is not tried for ever."""
    is_looked_up: bool = False
    """Whether a store that servers share was asked for its pages, and no fetch has failed since."""


class MemoryTiers(Tiers):
    """Host tier and disk tier. Requests that load are in phase ``LOADING``, out of the waiting queue.

    A *loading* request has a load in flight. Once the copy is done it is *loaded*: it keeps the pages, and is
    admitted before all waiting requests. A request that needs pages which are being loaded for another one *joins*
    that load, and returns to the waiting queue when the copy is done. So does a request whose pages are fetched
    from disk into the host tier; it is loaded from there then. A store that servers share is first asked
    which of them it has.

    The pages that loading and loaded requests still need beside the loaded ones are *promised*: nobody else is
    admitted into them, so that a load is not for nothing.

    Each chunk of a prompt is offered to the host tier when it is computed, and pages of the output when there are
    ``_OFFERED_TOKENS``: a preemption loses fewer.

    Args:
        cache: the page cache of the device.
        waiting: where the requests come from.
        host_tier: makes the copies.
        clock: seconds, monotonic.
        loads_ahead: whether pages are also copied for requests whose turn it is not yet, and not only for
            conversations that are expected back.
    """

    def __init__(
        self,
        cache: PageCache,
        waiting: Queue,
        host_tier: HostTier,
        clock: Callable[[], float],
        *,
        loads_ahead: bool = False,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._host_tier = host_tier
        self.host = host_tier.host
        self.n_host_slots = host_tier.copier.n_slots
        self.has_disk = host_tier.disk is not None
        self._clock = clock
        self._loads_ahead = loads_ahead
        self._expected: Callable[[], Iterable[NeededPrompt]] = tuple
        self._ahead = LoadAhead(host_tier, self._needed)
        self._loads: dict[Request, _Loading] = {}
        """The loading and loaded requests, in the order in which their loads began."""
        self._joined: dict[Request, HostLoad | Fetch | Lookup] = {}
        """What each request waits for that joined the load of another one, or waits for pages from disk or a shared
        store."""
        self._waits: dict[Request, _Wait] = {}
        """How each unfinished request that has loaded has waited."""
        self._n_offered: dict[Request, int] = {}
        """By running request: leading tokens that were offered."""
        self.n_promised = 0
        """Pages that the loading and loaded requests still need."""

    def __len__(self) -> int:
        return len(self._loads) + len(self._joined)

    def requests(self) -> list[Request]:
        """All requests in phase ``LOADING``. O(requests)."""
        return [*self._loads, *self._joined]

    def next_prompts(self) -> Iterator[WaitingPrompt]:
        """Yields namespace and tokens of the requests that will return to the waiting queue, and lease nothing.

        O(tokens) a request.
        """
        for request in self._joined:
            yield request.namespace, bytes(request.lookup_key)

    def block_tables(self) -> list[BlockTable]:
        """Returns the device's block tables of the loading and loaded requests, and of all copies. O(requests)."""
        return [*(load.blocks for load, _ in self._loads.values()), *self._host_tier.block_tables()]

    @property
    def is_busy(self) -> bool:
        """Whether pages are being copied between tiers. O(1)."""
        return self._host_tier.is_busy

    @property
    def delays_requests(self) -> bool:
        """Whether pages are being copied for which requests may wait: to any tier but the disk. O(1)."""
        return self._host_tier.delays_requests

    def watch(
        self,
        waiting: Callable[[], Iterable[WaitingPrompt]],
        expected: Callable[[], Iterable[NeededPrompt]],
        n_unclaimed: Callable[[Namespace], int],
    ) -> None:
        """Lets the host tier evict what waiting and expected prompts need last, and lets pages be loaded ahead."""
        host = self._host_tier.host
        host.upcoming_prompts = waiting
        host.expected_prompts = lambda: ((one.namespace, one.key) for one in expected())
        self._expected = expected
        self._ahead.n_unclaimed = n_unclaimed

    def _needed(self) -> Iterator[NeededPrompt]:
        """Yields what pages are loaded ahead for, the first one first."""
        if self._loads_ahead:
            yield from self._waiting.next_requests()
        yield from self._expected()

    def offer(self, namespace: Namespace, tokens: bytes, on_stored: Callable[[Namespace, bytes], None]) -> None:
        """Offers a sequence to the host tier, at the cost of ``HostTier.offer``."""
        self._host_tier.offer(namespace, tokens, on_stored)

    def loaded(self) -> list[Request]:
        """The loaded requests, the first to be admitted first. O(requests · log requests)."""
        loaded = [request for request, (load, _) in self._loads.items() if load.is_done]
        return sorted(loaded, key=lambda request: request.order)

    def is_loaded(self, request: Request) -> bool:
        """Whether the copy of a request's pages is done. O(1)."""
        return request in self._loads and self._loads[request].load.is_done

    def blocks(self, request: Request) -> BlockTable:
        """The block table of a loaded request, with its loaded pages. O(1)."""
        return self._loads[request].load.blocks

    def awaited(self, request: Request, *, are_counted: bool = True) -> AwaitedPages:
        """See ``Tiers.awaited``. Of a load that it joined, these are the pages of its own tokens."""
        page_size, loading = self._cache.page_size, self._loads.get(request)
        if loading is not None:
            load = loading.load
            first = load.start // page_size
            if load.is_done:
                return AwaitedPages("copied", None, first, 0, blocks=load.blocks)
            if load.lent is not None:
                return AwaitedPages("copy", "storage", first, len(load.pages), blocks=load.blocks)
            slots = load.lower.pages[first : first + len(load.pages)]
            return AwaitedPages("copy", "host", first, len(slots), slots, load.blocks)
        copy = self._joined[request]
        if isinstance(copy, Lookup):
            return AwaitedPages("lookup", "storage", 0, 0)
        stage: LoadStage = "fetch" if isinstance(copy, Fetch) else "copy"
        is_in_host = isinstance(copy, HostLoad) and copy.lent is None
        if not are_counted:
            return AwaitedPages(stage, "host" if is_in_host else "storage", 0, 0)
        first, last = (
            copy.start // page_size,
            n_common_tokens(bytes(request.lookup_key), bytes(copy.tokens)) // page_size,
        )
        if isinstance(copy, Fetch) or copy.lent is not None:
            return AwaitedPages(stage, "storage", first, max(0, last - first))
        slots = copy.lower.pages[first:last]
        return AwaitedPages(stage, "host", first, len(slots), slots)

    def begin(self, request: Request, n_available: int) -> bool:
        """Starts to load what a waiting request needs from the host tier, or joins such a load.

        O(pages), and O(edges) if there is nothing to load.

        Args:
            request: a waiting request.
            n_available: pages that the request may take.

        Returns:
            Whether the request has left the waiting queue. If not, it is to be computed from what the device has,
            or there are too few pages for it.
        """
        host_tier = self._host_tier
        if not request.uses_tiers or request.recovery.is_retried or request.recovery.bypasses_tree:
            return False
        cached = host_tier.match(request.namespace, request.key)
        joined = host_tier.find_load(request.namespace, request.key, cached.n_device)
        if joined is not None:
            self._join(request, joined, cached)
            return True
        n_missing = self._cache.pages_for(self._n_held(request)) - cached.n_device // self._cache.page_size
        if n_missing > n_available:
            return False
        wait = self._waits.get(request) or _Wait(self._clock())
        fetchable = request.key[: wait.n_fetchable_bytes]
        n_lendable = host_tier.n_lendable(request.namespace, fetchable, cached)
        if n_lendable and self._begin_load(request, cached, n_available, n_lendable):
            return True
        looks_up = not (wait.is_looked_up or self._ahead.has_looked_up(request))
        fetch = host_tier.find_fetch(request.namespace, fetchable, cached, looks_up=looks_up)
        if fetch is not None:
            self._join(request, fetch, cached)
            return True
        if not host_tier.choice.should_load(cached):
            if cached.n_beyond_device:
                host_tier.choice.decline("load")
            return False
        return self._begin_load(request, cached, n_available)

    def advance(self) -> bool:
        """Takes finished copies: their requests are loaded, and those that joined wait again. Then begins to copy
        what waiting requests will need, if none waits for a copy.

        Loaded requests whose pages were detached meanwhile wait again, too: a flush has dropped the pages, or the
        step that was to compute the pages before them has failed. O(loads).

        Returns:
            Whether a load has finished, or loaded pages are available again.
        """
        has_finished = self._host_tier.advance()
        for request, copy in list(self._joined.items()):
            if copy.is_done:
                wait = self._waits[request]
                wait.is_looked_up |= isinstance(copy, Lookup)
                if isinstance(copy, Fetch):
                    if copy.is_lost:  # what was read may have a state, which is of use if a token follows it
                        n_read = copy.start + copy.n_tokens
                        wait.n_fetchable_bytes = min((n_read + 1) * TOKEN_BYTES, len(copy.tokens) - TOKEN_BYTES)
                        wait.is_looked_up = False
                    request.cache_use.note("fetched", copy.start, copy.start + copy.n_tokens)
                    for first, last in copy.from_shared:
                        request.cache_use.note("shared", first, last)
                self._note_end(request)
                self.retract(request)
        for request, (load, _) in list(self._loads.items()):
            if load.is_done and self._waits[request].ended_at is None:
                self._note_end(request)
            if load.is_done and (load.is_lost or not load.blocks.can_commit):
                request.uses_tiers = request.uses_tiers and not load.has_failed
                self.retract(request)
                has_finished = True
        is_waiting = bool(self._joined) or not all(load.is_done for load, _ in self._loads.values())
        self._ahead.advance(may_begin=not is_waiting)
        return has_finished

    def take(self, request: Request) -> None:
        """Removes a loaded request, which is admitted with its block table. O(1)."""
        load, n_missing = self._loads.pop(request)
        self.n_promised -= n_missing
        end = len(load.tokens) // TOKEN_BYTES
        request.cache_use.note("loaded", load.start, end)
        if load.n_lent:
            for source in ("fetched", "shared"):
                request.cache_use.note(source, end - load.n_lent, end)

    def n_promised_to_others(self, request: Request) -> int:
        """Pages promised to other requests. O(1)."""
        loading = self._loads.get(request)
        return self.n_promised - (0 if loading is None else loading.n_missing)

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time.

        Requests whose pages are being copied to the device stay. Loaded pages stay cached, and what is being
        fetched from disk is cached when it comes. O(loads), and O(pages) a request.
        """
        taken = [
            request
            for request in self.requests()
            if (request in self._joined or self.is_loaded(request))
            and request.first_row is None
            and request.received_at < time_s
        ]
        for request in taken:
            self.leave(request)
        return taken

    def retract_last(self, may_give: Callable[[Request], bool]) -> bool:
        """Returns the last loaded request in order to the waiting queue; False if there is none. O(loads).

        Args:
            may_give: whether the pages of a request are of use.
        """
        loaded = [request for request, (load, _) in self._loads.items() if load.is_done and may_give(request)]
        if not loaded:
            return False
        self.retract(max(loaded, key=lambda request: request.order))
        return True

    def retract(self, request: Request) -> None:
        """Returns a request to the waiting queue; its loaded pages stay cached. O(pages)."""
        self.leave(request)
        self._waiting.add(request)

    def leave(self, request: Request) -> None:
        """Forgets a request, which is aborted, retracted or has waited too long. O(pages)."""
        if self._joined.pop(request, None) is None:
            load, n_missing = self._loads.pop(request)
            self.n_promised -= n_missing
            self._host_tier.leave(load)

    def used(self, request: Request) -> None:
        """Offers the cached prefix on which a request is admitted. O(pages leased)."""
        blocks = request.blocks
        n_bytes = blocks.n_leased * self._cache.page_size * TOKEN_BYTES
        if self._settle(request, n_bytes // TOKEN_BYTES):
            self._host_tier.count_hit(request.namespace, request.key[:n_bytes])
        if request.uses_tiers and n_bytes:
            self._host_tier.offer_used(request.namespace, request.key[:n_bytes])

    def computed(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Offers what a step has computed. O(rows), and the tokens of those requests that are due."""
        n_offered = self._n_offered
        for index, (row, request) in enumerate(zip(plan.rows, requests, strict=True)):
            end = row.start + row.n_tokens - row.n_drafts
            is_due = index >= plan.n_decode or end >= n_offered.get(request, 0) + _OFFERED_TOKENS
            if is_due and request.uses_tiers and request.phase is Phase.RUNNING:
                n_offered[request] = end
                self._host_tier.offer_computed(request.namespace, bytes(request.known_key[: end * TOKEN_BYTES]))

    def forked(self, parent: Request, fork: Request) -> None:
        """Counts as offered for a fork what was offered for its parent. O(1)."""
        if parent in self._n_offered:
            self._n_offered[fork] = self._n_offered[parent]

    def freeing(self, request: Request) -> None:
        """Offers what is computed of a request. O(tokens)."""
        self._n_offered.pop(request, None)
        if request.uses_tiers and request.blocks.is_in_tree:
            self._host_tier.offer_computed(request.namespace, bytes(request.known_key))

    def ended(self, choices: Sequence[Request]) -> tuple[float, float] | None:
        """Forgets the choices of a request; returns the wait of the first one that has waited. O(choices)."""
        for choice in choices:
            self._n_offered.pop(choice, None)  # a fork that has got no pages is never freed
        waits = [wait for choice in choices if (wait := self._waits.pop(choice, None)) is not None]
        return next(((wait.began_at, wait.ended_at) for wait in waits if wait.ended_at is not None), None)

    def step_done(self, plan: StepPlan, device_seconds: float) -> None:
        """Learns from a step how long it takes to compute a token of a prompt. O(rows)."""
        self._host_tier.choice.cost.add_step(plan.n_prompt_tokens, plan.n_tokens, device_seconds)

    def find(self, namespace: Namespace, tokens: bytes) -> TierHits:
        """Returns what the tiers have of a prompt beyond the device. O(edges), with a disk tier O(tokens)."""
        host_tier = self._host_tier
        cached = host_tier.match(namespace, tokens)
        with_all, with_disk = host_tier.match_all(namespace, tokens, cached)
        n_lendable = host_tier.n_lendable(namespace, tokens, cached)
        if n_lendable:
            with_disk = cached._replace(n_disk=n_lendable)
        n_used = len(tokens) // TOKEN_BYTES - 1  # a request computes at least one prompt token
        n_in_host = max(0, min(cached.n_host, n_used) - cached.n_device)
        n_memory = max(cached.n_host, cached.n_device)
        n_on_disk, n_fetched = (max(0, min(one.n_disk, n_used) - n_memory) for one in (with_all, with_disk))
        is_fetched = n_fetched > 0 and (n_lendable > 0 or host_tier.choice.should_load(with_disk))
        n_from_shared = None
        if is_fetched:
            n_from_shared = host_tier.n_from_shared(namespace, tokens, with_disk, are_lent=n_lendable > 0)
        return TierHits(
            n_in_host,
            is_loaded=n_in_host > 0 and (n_lendable > 0 or host_tier.choice.should_load(cached)),
            min_loaded_tokens=host_tier.choice.cost.min_tokens if host_tier.choice.policy == "auto" else None,
            n_on_disk=n_on_disk,
            is_fetched=is_fetched,
            n_fetched=n_fetched if is_fetched else 0,
            n_from_shared=n_from_shared,
            n_beyond_device=cached.n_beyond_device,
            n_beyond_host=with_all.n_beyond_host,
        )

    def stored(self, namespace: Namespace, tokens: bytes) -> StoredPrefix:
        """Returns how much of a prompt has reached each tier. Changes nothing. O(tokens + stores and offers)."""
        return self._host_tier.stored(namespace, tokens)

    def flush(self) -> None:
        """Empties all tiers, and drops the offers. O(nodes · log leaves + slots freed + pages on disk)."""
        self._host_tier.flush()

    def invalidate(self, namespace: Namespace, tokens: bytes, lowest: Tier) -> tuple[int | None, int | None]:
        """Drops every sequence that begins with ``tokens``, also from copies in flight."""
        if lowest == "device":
            return 0, 0 if self.has_disk else None
        dropped = self._host_tier.invalidate(namespace, tokens, drops_disk=lowest == "storage")
        return dropped[0], dropped[1] if self.has_disk else None

    def stats(self) -> tuple[HostStats | None, DiskStats | None, DiskStats | None]:
        """Returns the counters and gauges of host tier, disk tier and shared store. O(1)."""
        disk = self._host_tier.disk
        of_stores = (None, None) if disk is None else disk.stats()
        return self._host_tier.stats(len(self), self._ahead.n_loaded, self._ahead.n_used), *of_stores

    def changes(self) -> list[TierChanges]:
        """Begins to record the changes of host tier and disk tier; returns their sources. O(1)."""
        host, disk = self._host_tier.host, self._host_tier.disk
        changes = host.tree.record_changes()
        tiers = [TierChanges("CPU", changes, host.tree.computed_pages, changes.kept_states)]
        if disk is not None:
            disk.changes.is_on = True
            tiers.append(TierChanges("STORAGE", disk.changes, disk.changes.stored_pages))
        return tiers

    def check(self) -> None:
        """Checks that every host slot is in exactly one place. O(slots). Raises ``InvariantError``."""
        self._host_tier.check()

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when a copy has finished."""
        return self._host_tier.descriptors()

    def close(self, timeout_s: float) -> None:
        """Ends the copies, and frees the memory. Writes to disk what was offered, as far as the time allows."""
        self._host_tier.close(timeout_s)

    def _begin_load(self, request: Request, cached: CachedPrefixes, n_available: int, n_lendable: int = 0) -> bool:
        """Starts to load for a request; returns whether there is room, and what is to be lent could be lent.

        Args:
            request: a waiting request.
            cached: what ``HostTier.match`` has returned for it.
            n_available: pages that it may take.
            n_lendable: what ``HostTier.n_lendable`` has returned for it; 0 to load from the host tier alone.
        """
        host_tier = self._host_tier
        n_held = self._n_held(request)
        n_pages = self._cache.pages_for(n_held)
        n_kept = self._cache.n_available_to(request.namespace) - n_available
        load = host_tier.begin_load(request.namespace, request.key, n_pages, n_kept, n_lendable=n_lendable)
        if load is None:
            return False
        self._settle(request, cached.n_device)
        self._take(request)
        loading = _Loading(load, self._cache.n_missing(load.blocks, n_held, host_tier.max_row_tokens))
        self._loads[request] = loading
        self.n_promised += loading.n_missing
        return True

    def _n_held(self, request: Request) -> int:
        """Returns how many tokens' pages a request has at most while it computes its known ones. O(1)."""
        n_known, eviction = request.n_known, request.kv_eviction
        if eviction is None:
            return n_known
        return min(n_known, eviction.most_pages(request.n_prompt) * self._cache.page_size)

    def _take(self, request: Request) -> None:
        self._waiting.remove(request)
        request.phase = Phase.LOADING
        wait = self._waits.setdefault(request, _Wait(self._clock()))
        if request.first_row is None:
            wait.ended_at = None

    def _join(self, request: Request, copy: HostLoad | Fetch | Lookup, cached: CachedPrefixes) -> None:
        if not self._ahead.is_copying(request):  # its own copy is settled when the request is admitted
            self._settle(request, cached.n_device)
        self._take(request)
        self._joined[request] = copy

    def _settle(self, request: Request, n_found: int) -> bool:
        """Notes what was copied ahead for a request whose turn it is; returns whether the device has any of it.

        O(copies).

        Args:
            request: the request.
            n_found: leading tokens that the device has.
        """
        brought = self._ahead.settle(request, n_found)
        if brought is None:
            return False
        for first, last in brought.fetched:
            request.cache_use.note("fetched", first, last)
        for first, last in brought.from_shared:
            request.cache_use.note("shared", first, last)
        found = [(first, min(last, n_found)) for first, last in brought.loaded if first < n_found]
        for first, last in found:
            request.cache_use.note("loaded", first, last)
        return bool(found)

    def _note_end(self, request: Request) -> None:
        if request.first_row is None:
            self._waits[request].ended_at = self._clock()
