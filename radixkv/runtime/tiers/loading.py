"""The waiting requests whose cached prefix is copied from another tier to the device before they are admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tenants.fair_queue import Queue
from radixkv.runtime.tiers.disk_tier import Fetch, Lookup
from radixkv.runtime.tiers.tier_copies import Load
from radixkv.runtime.tiers.transfers import Transfers
from radixkv.tree.node import TOKEN_BYTES
from radixkv.tree.spared import WaitingPrompt


class _Loading(NamedTuple):
    load: Load
    n_missing: int
    """Pages that the request needs beside the loaded ones."""


class LoadingRequests:
    """The requests in phase ``LOADING``: out of the waiting queue, without a batch slot.

    A *loading* request has a load in flight. Once the copy is done it is *loaded*: it keeps the pages, and is
    admitted before all waiting requests. A request that needs pages which are being loaded for another one *joins*
    that load, and returns to the waiting queue when the copy is done. So does a request whose pages are fetched
    from disk into the host tier; it is loaded from there then. A store that servers share is first asked
    which of them it has.

    The pages that loading and loaded requests still need beside the loaded ones are *promised*: nobody else is
    admitted into them, so that a load is not for nothing.

    Args:
        cache: the page cache of the device.
        waiting: where the requests come from.
        transfers: makes the copies; None: no request is ever loaded.
        clock: seconds, monotonic.
    """

    def __init__(
        self, cache: PageCache, waiting: Queue, transfers: Transfers | None, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._transfers = transfers
        self._clock = clock
        self._loads: dict[Request, _Loading] = {}
        """Of the loading and loaded requests, in the order in which their loads began."""
        self._joined: dict[Request, Load | Fetch | Lookup] = {}
        """Of the requests that wait for a load of another one, or for pages from disk or a shared store."""
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
            yield request.namespace, bytes(request.tokens)

    def block_tables(self) -> list[BlockTable]:
        """The block tables of the loading and loaded requests. O(requests)."""
        return [load.blocks for load, _ in self._loads.values()]

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
        transfers = self._transfers
        if transfers is None or not request.uses_tiers or request.is_retried or request.bypasses_tree:
            return False
        cached = transfers.match(request.namespace, request.key)
        joined = transfers.find_load(request.namespace, request.key, cached.n_device)
        if joined is not None:
            self._take(request)
            self._joined[request] = joined
            return True
        n_missing = self._cache.pages_for(request.n_known) - cached.n_device // self._cache.page_size
        if n_missing > n_available:
            return False
        if request.uses_disk:
            fetch = transfers.find_fetch(request.namespace, request.key, cached, looks_up=not request.is_looked_up)
            if fetch is not None:
                self._take(request)
                self._joined[request] = fetch
                return True
        if not transfers.should_load(cached):
            if cached.n_beyond_device:
                transfers.count_declined()
            return False
        n_pages = self._cache.pages_for(request.n_known)
        n_kept = self._cache.n_available_to(request.namespace.tenant) - n_available
        load = transfers.begin_load(request.namespace, request.key, n_pages, n_kept)
        if load is None:
            return False
        self._take(request)
        loading = _Loading(load, self._cache.pages_for(request.n_known) - len(load.blocks.pages))
        self._loads[request] = loading
        self.n_promised += loading.n_missing
        return True

    def advance(self) -> bool:
        """Takes finished copies: their requests are loaded, and those that joined wait again.

        So do the loaded ones whose pages were detached meanwhile: a flush has dropped the pages, or the step that
        was to compute the pages before them has failed. O(loads).

        Returns:
            Whether a load has finished, or loaded pages are available again.
        """
        if self._transfers is None:
            return False
        has_finished = self._transfers.advance()
        for request, copy in list(self._joined.items()):
            if copy.is_done:
                request.is_looked_up |= isinstance(copy, Lookup)
                if isinstance(copy, Fetch):
                    request.uses_disk = not copy.has_failed
                    request.cache_use.note("fetched", copy.start, copy.start + copy.n_tokens)
                self._note_end(request)
                self.retract(request)
        for request, (load, _) in list(self._loads.items()):
            if load.is_done and request.load_ended_at is None:
                self._note_end(request)
            if load.is_done and (load.is_lost or not load.blocks.can_commit):
                request.uses_tiers = request.uses_tiers and not load.has_failed
                self.retract(request)
                has_finished = True
        return has_finished

    def take(self, request: Request) -> None:
        """Removes a loaded request, which is admitted with its block table. O(1)."""
        load, n_missing = self._loads.pop(request)
        self.n_promised -= n_missing
        end = len(load.tokens) // TOKEN_BYTES
        request.cache_use.note("loaded", end - load.n_pages * self._cache.page_size, end)

    def n_promised_to_others(self, request: Request) -> int:
        """Pages promised to other requests. O(1)."""
        loading = self._loads.get(request)
        return self.n_promised - (0 if loading is None else loading.n_missing)

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time.

        Those stay whose pages are being copied to the device. Loaded pages stay cached, and what is being fetched
        from disk is cached when it comes. O(loads), and O(pages) a request.
        """
        taken = [
            request
            for request in self.requests()
            if (request in self._joined or self.is_loaded(request))
            and request.scheduled_at is None
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
        request.phase = Phase.WAITING
        self._waiting.add(request)

    def leave(self, request: Request) -> None:
        """Forgets a request, which is aborted, retracted or has waited too long. O(pages)."""
        if self._joined.pop(request, None) is None:
            load, n_missing = self._loads.pop(request)
            self.n_promised -= n_missing
            assert self._transfers is not None, "only transfers make loads"
            self._transfers.leave(load)

    def _take(self, request: Request) -> None:
        self._waiting.remove(request)
        request.phase = Phase.LOADING
        if request.scheduled_at is None:
            request.load_ended_at = None
            if request.load_began_at is None:
                request.load_began_at = self._clock()

    def _note_end(self, request: Request) -> None:
        if request.scheduled_at is None:
            request.load_ended_at = self._clock()
