"""The running requests: how they get a batch slot and pages, share pages with their forks, and free them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count
from math import ceil
from operator import ne

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.headroom import Headroom
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.shares import Shares
from radixkv.runtime.protocols.states import States
from radixkv.runtime.protocols.tiers import Tiers
from radixkv.runtime.request import Phase, Request
from radixkv.tree.node import Namespace


class RunningRequests:
    """The requests that hold a batch slot and pages.

    *Active* requests are scheduled; iteration yields them in the order of their admission. *Releasing* requests
    have finished or were preempted: they keep batch slot and pages until no launched step uses them, and until the
    forks that copy their tail have copied it.

    Args:
        cache: the page cache of the device.
        waiting: where requests come from, and where preempted ones return to.
        tiers: the memory tiers behind the pool.
        shares: divides batch slots and pages among senders.
        states: those of recurrent layers.
        headroom: foresees the pages that active requests will need.
        n_batch_slots: batch slots in all.
        max_row_tokens: maximum tokens of a row.
        n_reserved_tokens: tokens that an admission leaves free for each active request, so that their next ones do
            not soon cause a preemption.
        max_reserved_share: limit of these reserved pages, as a fraction of the pool: many short requests free pages
            as fast as others need them.
    """

    def __init__(
        self,
        cache: PageCache,
        waiting: Queue,
        tiers: Tiers,
        shares: Shares,
        states: States,
        headroom: Headroom,
        n_batch_slots: int,
        max_row_tokens: int,
        *,
        n_reserved_tokens: int,
        max_reserved_share: float,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._tiers = tiers
        self._shares = shares
        self._states = states
        self._headroom = headroom
        self._free_batch_slots = list(range(n_batch_slots - 1, -1, -1))
        self._sent_entries: dict[int, list[int]] = {}
        """By free batch slot: the leading entries of its block table that the device has from the last request."""
        self._active: dict[Request, None] = {}
        self._releasing: dict[Request, None] = {}
        self.n_preemptions = 0
        """Preemptions for lack of pages since the start; those for retries do not count."""
        self._n_reserved_tokens = n_reserved_tokens
        self._max_reserved_pages = ceil(cache.n_pages * max_reserved_share)
        self._has_begun_again = False
        self._max_row_tokens = max_row_tokens
        self._max_private_pages = cache.windows.max_pages(max_row_tokens)

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._active))

    @property
    def releasing(self) -> tuple[Request, ...]:
        """The releasing requests. O(releasing)."""
        return tuple(self._releasing)

    @property
    def is_releasing(self) -> bool:
        """Whether any request is releasing: its pages will become free. O(1)."""
        return bool(self._releasing)

    @property
    def has_free_batch_slot(self) -> bool:
        """Whether another request can get a batch slot, if its sender may have one."""
        return bool(self._free_batch_slots)

    def has_batch_slot_for(self, request: Request) -> bool:
        """Whether a request can get a batch slot now. O(1)."""
        return bool(self._free_batch_slots) and self._shares.may_take_batch_slot(request)

    def prefilling(self) -> list[Request]:
        """Active requests that have more to compute than the token sampled last. O(running)."""
        return [one for one in self._active if one.n_scheduled < one.n_known and not one.is_decoding]

    def block_tables(self) -> list[BlockTable]:
        """The block tables of all active and releasing requests. O(running)."""
        return [request.blocks for request in (*self._active, *self._releasing)]

    def assign_batch_slot(
        self, request: Request, prefilling: Iterable[Request], *, only_reserved: bool = False
    ) -> bool:
        """Gives a waiting or loaded request a batch slot and a lease on its cached prefix.

        Returns False, without either, if the request needs more pages beyond its prefix than ``n_room`` says.
        O(prefilling), and the cost of ``PageCache.open``.
        """
        is_loaded = request.phase is Phase.LOADING
        if is_loaded:
            blocks = self._tiers.blocks(request)
            self._cache.extend(blocks, request.lookup_key)
        else:
            blocks = self._cache.open(
                request.namespace, request.key, request.reads_cache, request.recovery.bypasses_tree, is_hit=False
            )
        if self._n_missing(request, blocks) > self.n_room(request, prefilling, only_reserved=only_reserved):
            if not is_loaded:
                self._cache.close(blocks)
            if self._active or self._releasing or not self._begins_anew(request):
                return False
            return self.assign_batch_slot(request, prefilling, only_reserved=only_reserved)
        if is_loaded:
            self._tiers.take(request)
        self._assign(request, blocks)
        return True

    def count_hit(self, request: Request) -> None:
        """Counts a hit of the cached prefix of a request that is admitted, and tells the tiers of it.

        Call it when the request has a row, and before it commits pages of its own. O(pages leased).
        """
        if not request.is_canary:
            self._cache.count_hit(request.blocks)
        self._tiers.used(request)

    def n_room(self, request: Request, prefilling: Iterable[Request], *, only_reserved: bool = False) -> int:
        """Returns how many pages a request may take at its admission; negative if others need more than there are.

        The room is the available pages, less those that prefilling requests ahead still need, those left free for
        the next tokens of active requests, and those promised to loading requests. It is at least the pages
        reserved for its sender, less what the sender's other requests need. No room is kept for ``max_tokens``,
        which says little about the length of an output: the whole queue would wait behind it. O(prefilling).

        Args:
            request: a waiting or loaded request.
            prefilling: the requests whose prompts are being prefilled.
            only_reserved: whether to count only the reserved pages of its sender, because an earlier request waits
                for the others.
        """
        n_promised = self._tiers.n_promised_to_others(request)
        n_reserved = self._shares.n_reserved(request)
        if n_reserved or only_reserved:
            own = [one for one in prefilling if self._shares.is_of_same(one, request)]
            n_reserved -= self._n_needed_ahead(request, own) + n_promised
        if only_reserved:
            return n_reserved
        room = self._n_room(request, self._n_needed_ahead(request, prefilling) + n_promised)
        return max(room, n_reserved) if n_reserved > 0 else room

    def n_unclaimed(self, namespace: Namespace) -> int:
        """Returns how many pages the namespace's owner can have beside what all running and loading requests still
        need; negative if these need more than there are. O(running)."""
        n_needed = sum(self._n_missing(one, one.blocks) for one in self.prefilling())
        return self._n_left(namespace) - n_needed - self._tiers.n_promised

    def start(self, request: Request) -> None:
        """Makes a request active that has a batch slot."""
        request.phase = Phase.RUNNING
        self._active[request] = None
        self._headroom.started(request)

    def free(self, request: Request) -> None:
        """Frees the request's batch slot and pages; no launched step may still use them.

        The device keeps this block table. If the next request in the batch slot begins with the same pages, those
        entries are not sent again.
        """
        self.copies_done(request)
        self._tiers.freeing(request)
        self._states.freed(request)
        n_sent = 0 if request.blocks.skipped else request.blocks.n_on_device
        self._sent_entries[request.batch_slot] = request.blocks.pages[:n_sent]
        self._cache.close(request.blocks)
        request.block_table = None
        self._free_batch_slots.append(request.batch_slot)
        self._shares.give_batch_slot_back(request)
        request.batch_slot = -1
        request.n_scheduled = 0

    def fork_followers(self, leader: Request) -> None:
        """Starts the followers of a leader whose first token is known, on the leader's pages.

        Each follower computes only the prompt's last token. Costs as much as ``fork``.
        """
        for follower in leader.followers:
            follower.known_key = leader.prompt_key
        self.fork([(leader, follower) for follower in leader.followers])
        leader.followers = []

    def fork(self, forks: Sequence[tuple[Request, Request]]) -> None:
        """Starts requests on the pages of others, which have computed all their known tokens but the last.

        Those without a free batch slot or enough pages join the waiting queue, and read from the tree what it holds
        when they are admitted. O(running), and ``PageCache.fork`` for each fork.

        Args:
            forks: the request that has the pages, and the one to start, which has neither batch slot nor pages.
        """
        if not forks:
            return
        n_needed_ahead = self._n_needed_ahead(forks[0][0], self.prefilling()) + self._tiers.n_promised
        for leader, follower in forks:
            follower.first_row = leader.first_row
            follower.leader = None
            follower.reads_cache = True
            self._tiers.forked(leader, follower)
            if self._can_fork(leader, follower, n_needed_ahead):
                self._fork(leader, follower)
            else:
                self._waiting.add(follower)

    def drop(self, request: Request) -> None:
        """Takes batch slot and pages from an active request that no launched step and no fork uses. O(pages)."""
        self._stop(request)
        self.free(request)

    def make_way(self) -> bool:
        """Preempts the last in order of the paused requests, which wait for others; False if there is none.

        They have no row that could preempt others, and the others may need their pages or batch slots. So is the
        only request that runs, if it has just been preempted to begin again. O(running).
        """
        if self._has_begun_again:
            self._has_begun_again = False
            return True
        return self._preempt_last([request for request in self._active if request.is_paused])

    def make_way_for_stuck(self) -> None:
        """Makes way for each sender whose rows all belong to its paused requests. Costs what ``Shares.stuck`` does.

        Such a sender may get no further batch slot, so its waiting requests would wait for ever. ``schedule`` does
        not notice that while other senders have rows.
        """
        for paused in self._shares.stuck(self._active):
            self._preempt_last(paused)

    def _preempt_last(self, requests: Sequence[Request]) -> bool:
        victim = max(requests, key=lambda request: request.order, default=None)
        if victim is None:
            return False
        self._preempt_for_pages(victim)
        return True

    def copies_done(self, fork: Request) -> None:
        """Lets go of the leader's tail: the fork's first row has copied it, or will never run."""
        if fork.leader is not None:
            fork.leader.n_pending_copies -= 1
            fork.leader = None

    def grow(self, request: Request, n_tokens: int) -> bool:
        """Gives the request pages for ``n_tokens``; False if it cannot.

        Evicts from the tree first, then takes the pages of loaded requests, then preempts running requests, see
        ``_next_victim``. Some request is never preempted, so that one always makes progress. A request
        with pages behind its windows preempts nothing: it frees them, as soon as no launched row and no fork reads
        them.
        """
        blocks = request.blocks
        if n_tokens <= len(blocks.pages) * self._cache.page_size:
            return True
        n_pages = self._cache.pages_for(n_tokens)
        if self._waits_for_window_slabs(request, n_pages - len(blocks.pages)):
            return False
        while not self._cache.reserve(blocks, n_pages):
            if request.phase is not Phase.RUNNING or self.is_releasing:
                return False  # an admission preempts nothing, and pages of releasing requests come free soon
            if self._cache.is_behind(blocks, request.n_scheduled):
                if request.n_in_flight or request.n_pending_copies:
                    return False
                self._cache.free_behind(blocks, request.n_scheduled)
                continue
            if self._tiers.retract_last(self._shares.may_give(request)):
                continue
            if len(self) < 2:
                if not request.n_in_flight and self._begins_again(request):
                    self._has_begun_again = True
                    self._preempt_for_pages(request)
                return False
            victim = self._next_victim(request)
            self._preempt_for_pages(victim)
            if victim is request:
                return False
        return True

    def finish(self, request: Request) -> None:
        """Finishes an active or releasing request; ``release`` frees it."""
        self._stop(request)
        self._headroom.ended(request)
        request.phase = Phase.FINISHED
        self._releasing[request] = None

    def preempt(self, request: Request, *, discards_results: bool = True) -> None:
        """Preempts an active or releasing request; ``release`` frees it and puts it back into the waiting queue.

        Args:
            request: the request.
            discards_results: whether the results of its launched rows are dropped.
        """
        self._stop(request)
        request.phase = Phase.PREEMPTED
        request.recovery.discards_results |= discards_results
        self._releasing[request] = None

    def release(self) -> None:
        """Frees the releasing requests that no launched step and no pending copy uses. O(releasing)."""
        while done := [r for r in self._releasing if not (r.n_in_flight or r.n_pending_copies)]:
            for request in done:  # freeing a fork can make its leader ready to be freed: hence the outer loop
                del self._releasing[request]
                self.free(request)
                request.recovery.discards_results = False
                if request.phase is Phase.FINISHED and request.cache_use.counted is not None:
                    self.notify_released(request)
                if request.phase is Phase.PREEMPTED and request.is_paused:
                    request.phase = Phase.PAUSED
                elif request.phase is Phase.PREEMPTED:
                    self._waiting.add(request)

    def notify_released(self, request: Request) -> None:
        """Tells the observers of a finished choice that it has released its pages. Costs what they cost."""
        for observer in request.observers:
            observer.released(request)

    def _stop(self, request: Request) -> None:
        self._active.pop(request, None)
        self._headroom.stopped(request)

    def _preempt_for_pages(self, victim: Request) -> None:
        self.n_preemptions += 1
        victim.recovery.n_lost = max(victim.recovery.n_lost, victim.n_scheduled)
        self.preempt(victim, discards_results=False)
        self.release()

    def _waits_for_window_slabs(self, request: Request, n_windows: int) -> bool:
        """Returns whether a request that has begun again, and runs alone, waits for its launched rows: they free
        window pages in slabs for windows only, and it must not take others meanwhile. O(1)."""
        if not request.recovery.bypasses_tree or len(self) > 1:
            return False
        return request.n_in_flight > 0 and self._cache.window_pages.waits_for_own_slabs(n_windows)

    def _begins_anew(self, request: Request) -> bool:
        """Returns whether there may be room for a request that does not fit though none runs: a loaded one gives up
        its pages and begins as a waiting one, which begins without the cache once none loads.

        The tails of others that were loaded after it may have the slabs for windows only that were promised to it.
        """
        if request.phase is Phase.LOADING:
            can_be_short = self._cache.window_pages.can_replace_pages
            return can_be_short and self._tiers.retract_last(lambda one: one is request)
        return not len(self._tiers) and self._begins_again(request)

    def _begins_again(self, request: Request) -> bool:
        """Returns whether there will be room for a request that runs alone, because it begins without the cache.

        Its window pages, and those of tails, may lie where it needs other pages: they were taken while those slabs
        were in use that are for windows only. O(tails) once for a request.
        """
        if request.recovery.bypasses_tree or not self._cache.window_pages.evict_tails():
            return False
        request.recovery.bypasses_tree = True  # tails that it kept on its way would be in those slabs again
        return True

    def _next_victim(self, request: Request) -> Request:
        """Returns the running request to preempt for the pages of ``request``: the last in order of the victims.

        Requests whose pages are of no use to ``request`` are left out. O(running), and ``Shares.victims``.
        """
        candidates = list(filter(self._shares.may_give(request), self._active))
        return max(self._shares.victims(candidates), key=lambda one: one.order)

    def _n_needed_ahead(self, request: Request, prefilling: Iterable[Request]) -> int:
        """Pages that the prefilling requests with precedence over ``request`` still need. O(prefilling)."""
        ahead = (one for one in prefilling if self._shares.is_ahead(one, request))
        return sum(self._n_missing(one, one.blocks) for one in ahead)

    def _n_missing(self, request: Request, blocks: BlockTable) -> int:
        """Pages that the request lacks to compute its known tokens. O(1)."""
        n_missing = self._cache.n_missing(blocks, request.n_known, self._max_row_tokens)
        if request.kv_eviction is not None:
            n_held = len(blocks.pages) - blocks.n_dropped
            return min(n_missing, max(0, request.kv_eviction.most_pages(request.n_prompt) - n_held))
        if blocks.lease is not None or self._max_private_pages is None:
            return n_missing
        n_held = len(blocks.pages) - blocks.n_freed
        return min(n_missing, max(0, self._max_private_pages - n_held))

    def _can_fork(self, leader: Request, follower: Request, n_needed_ahead: int) -> bool:
        """Whether a follower can start now, beside the pages that prefilling requests ahead still need. O(1).

        With recurrent layers it needs the leader's state. One that has moved on is of no use, as that of a leader
        with choices: then the follower goes on from a state of the tree.
        """
        if self._cache.recurrent_states is not None and leader.n_scheduled != follower.n_known - 1:
            return False
        if leader.phase is not Phase.RUNNING or not self.has_batch_slot_for(follower):
            return False
        n_room, n_known = self._n_room(follower, n_needed_ahead), follower.n_known
        return self._cache.can_fork(leader.blocks, n_known - 1, self._cache.pages_for(n_known), n_room)

    def _fork(self, leader: Request, follower: Request) -> None:
        n_tokens = follower.n_known - 1
        blocks = self._cache.fork(leader.blocks, n_tokens, self._cache.pages_for(follower.n_known))
        self._assign(follower, blocks)
        self.start(follower)
        follower.n_scheduled = n_tokens
        self._states.forked(leader, follower)
        if blocks.has_copies:
            follower.leader = leader
            leader.n_pending_copies += 1

    def _assign(self, request: Request, blocks: BlockTable) -> None:
        request.block_table = blocks
        request.batch_slot = self._free_batch_slots.pop()
        blocks.n_on_device = _n_equal(self._sent_entries.pop(request.batch_slot, []), blocks.pages)
        self._shares.take_batch_slot(request)
        request.needs_history = request.sampling.has_penalties

    def _n_left(self, namespace: Namespace) -> int:
        """Returns the pages for a namespace's owner beyond those left for the active requests."""
        n_next = min(self._cache.pages_for(self._n_reserved_tokens * len(self._active)), self._max_reserved_pages)
        return self._cache.n_available_to(namespace) - n_next

    def _n_room(self, request: Request, n_needed: int) -> int:
        """Returns the pages for a request beyond ``n_needed`` and those left for the active ones.

        What these are expected to need is not in the way of a sender whose cap limits it, where others have room.
        """
        n_free = self._n_left(request.namespace)
        if self._active and (n_expected := self._headroom.n_expected(request)):
            n_unreserved = self._cache.n_available - self._shares.n_reserved_beside(request)
            n_free = min(n_free, n_unreserved - n_expected)
        return n_free - n_needed


def _n_equal(first: list[int], second: list[int]) -> int:
    """Returns the length of the lists' common beginning. O(that length)."""
    # ``map`` and ``compress`` loop in C: some 50 ns a page.
    return next(compress(count(), map(ne, first, second)), min(len(first), len(second)))
