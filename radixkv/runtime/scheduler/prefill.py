"""The rows of prompts in a step: chunks of those that are being prefilled, and of those that are admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.shares import Shares
from radixkv.runtime.protocols.states import States
from radixkv.runtime.protocols.tiers import Tiers
from radixkv.runtime.request import FirstRow, Phase, Request
from radixkv.runtime.scheduler.misses import find_miss
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.step.plan import Row


class PlannedRow(NamedTuple):
    """A prompt's row of the next plan, and its request."""

    request: Request
    row: Row


class PrefillRows:
    """Plans the rows of prompts, and with them which waiting requests are admitted.

    Args:
        cache: the page cache of the device.
        waiting: the waiting requests.
        tiers: the memory tiers behind the pool.
        running: the requests with pages.
        shares: divides batch slots and pages among senders.
        states: those of recurrent layers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PageCache,
        waiting: Queue,
        tiers: Tiers,
        running: RunningRequests,
        shares: Shares,
        states: States,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._shares = shares
        self._states = states
        self._tiers = tiers
        self._running = running
        self._clock = clock
        self.n_recomputed = 0
        """Tokens computed since the start whose KV their requests had before a preemption for lack of pages. What
        such a request finds in the tree, or loads, is not computed again."""
        self._refused: Request | None = None
        """The first of the retried requests that did not fit when they were last tried."""
        self._blocked: tuple[int, int, int] | None = None
        """(available pages that are not promised, running requests, queue version) when a waiting request last did
        not fit.

        None if none was refused, or if a prompt's last chunk was planned or a load has finished since."""

    def alone(self, request: Request, budget: int, step: int) -> list[PlannedRow]:
        """Makes the row of a request that is retried alone; none if it does not fit. O(tokens + new pages)."""
        if request.phase is Phase.RUNNING:
            return self.chunks([request], budget, step)
        blocked = self._blocked
        rows = self._admit([request], budget, step)
        self._blocked = blocked
        if not rows and self.refused is None:
            self._refused = request
        return rows

    def forget_refused(self) -> None:
        """Notes that the retried requests are tried once more, in order: the one that was refused may fit now."""
        self._refused = None

    @property
    def refused(self) -> Request | None:
        """The first waiting request that is retried alone and did not fit: no other of its sender comes before it,
        or they would take each page that becomes free, and it would never start."""
        return self._refused if self._refused is not None and self._refused.phase is Phase.WAITING else None

    def unblock(self) -> None:
        """Notes that a waiting request may fit now, though neither pages nor requests have become fewer."""
        self._blocked = None

    def together(self, prefilling: list[Request], budget: int, step: int) -> list[PlannedRow]:
        """Makes the rows of prompts: of those that are prefilling, and of waiting ones that are admitted.

        Prompts start in order, but none holds back shorter ones: where a step does not finish a prompt, a fair
        share of its budget goes to waiting prompts that have at most half as much to compute. So all prompts that
        are prefilled at once have together at most twice as much to compute as the longest. See
        docs/decisions/0019-fair-chunks.md.
        """
        prefilling = [one for one in prefilling if one.phase is Phase.RUNNING]  # not preempted by a decode row
        n_left = sorted(_n_left(one) for one in prefilling)
        if sum(n_left) <= budget:
            chunks = self.chunks(prefilling, budget, step)
            admitted = self._admit(self._candidates(), budget - _n_tokens(chunks), step)
            rows = chunks + admitted
        else:
            share = min(_fair_share(n_left, budget), budget - self._cache.page_size)  # a chunk is at least a page
            unfinished = [one for one in prefilling if _n_left(one) > share]
            shortest = min(_n_left(one) for one in unfinished)
            admitted = self._admit(self._overtaking(shortest // 2, unfinished), share, step)
            rows = admitted + self.chunks(prefilling, budget - _n_tokens(admitted), step)
        if admitted:
            self._waiting.count_passes([request for request, _ in admitted])
        return rows

    def chunks(self, prefilling: list[Request], budget: int, step: int) -> list[PlannedRow]:
        """Makes the rows of prefilling prompts, which share the budget fairly: others get what one cannot use."""
        rows: list[PlannedRow] = []
        shortest_first = sorted(prefilling, key=_n_left)
        for n_done, request in enumerate(shortest_first):
            if request.phase is not Phase.RUNNING:
                continue
            if request.reads_cache:
                self._cache.extend(request.blocks, request.lookup_key)
            share = max(budget // (len(prefilling) - n_done), min(budget, self._cache.page_size))
            row = self._prefill_row(request, share, step)
            if row is not None:
                rows.append(PlannedRow(request, row))
                budget -= row.n_tokens
                if request.n_scheduled == request.n_known:
                    self._blocked = None  # waiting requests with the same prompt need no pages for it any more
        return rows

    @property
    def admits(self) -> bool:
        """Whether a waiting or loaded request may be admitted now: not where the queue is blocked. O(1)."""
        return any(True for _ in self._tiers.loaded()) or (bool(self._waiting) and not self._is_blocked())

    def _candidates(self) -> Iterator[Request]:
        """Yields requests in the order in which to try to admit them.

        First come the loaded ones, whose pages are promised. Waiting ones follow, but none while the queue is
        blocked.
        """
        yield from self._tiers.loaded()
        if self._waiting and not self._is_blocked():
            yield from self._waiting.candidates()

    def _overtaking(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterator[Request]:
        """Yields waiting requests that have at most ``n_tokens`` to compute; none while the queue is blocked."""
        if self._waiting and not self._is_blocked():
            yield from self._waiting.short(n_tokens, unfinished)

    def _admit(
        self,
        candidates: Iterable[Request],
        budget: int,
        step: int,
        prefilling: list[Request] | None = None,
        *,
        only_reserved: bool = False,
    ) -> list[PlannedRow]:
        """Admits candidates in order until one does not fit, beside what prefilling requests still need.

        If a candidate does not fit because of its sender's cap or rows, later candidates may still take any pages.
        If it does not fit for another reason, later ones may take only pages that are reserved for their own
        senders; if there are none, admission ends.

        If the rest of the budget does not finish a prompt, half of that rest goes to shorter waiting prompts.

        Args:
            candidates: not started if nothing can be admitted, because ranking the queue takes long.
            budget: maximum tokens of the rows.
            step: number of the step.
            prefilling: the prefilling requests; None for those that are running.
            only_reserved: whether they get only the reserved pages of their senders, because an earlier request
                waits for the others.
        """
        admitted: list[PlannedRow] = []
        if budget <= 0 or not self._running.has_free_batch_slot:
            return admitted
        if prefilling is None:
            prefilling = self._running.prefilling()
        refused = self.refused
        for request in candidates:
            if request.block_table is not None:
                continue  # it has overtaken a candidate, or is the one that others overtake
            if refused is not None and request is not refused and request.phase is Phase.WAITING:
                if self._shares.is_of_same(request, refused):
                    continue
                only_reserved = only_reserved or self._lacks_common_pages(refused)
            if request.phase is Phase.LOADING and not self._tiers.is_loaded(request):
                continue  # its load began as it tried to overtake a candidate
            if not self._running.has_batch_slot_for(request):
                continue
            if request.phase is Phase.WAITING and self._states.is_awaited(request):
                continue
            if request.phase is Phase.WAITING and self._tiers.begin(
                request, self._running.n_room(request, prefilling, only_reserved=only_reserved)
            ):
                continue
            is_loaded = request.phase is Phase.LOADING
            if not self._running.assign_batch_slot(request, prefilling, only_reserved=only_reserved):
                self._blocked = (self._n_unpromised, len(self._running), self._waiting.version)
                if not self._lacks_common_pages(request) or (is_loaded and request.phase is Phase.WAITING):
                    continue  # one that was loaded has given its pages up: they may be those that others lack
                if not self._shares.n_reserved_beside(request):
                    break
                only_reserved = True
                continue
            n_left = _row_limit(request) - request.blocks.n_leased * self._cache.page_size
            if n_left > budget and not request.recovery.is_retried:  # a retried request stays alone
                overtaking = self._overtaking(n_left // 2, [request])
                share = min(budget // 2, budget - self._cache.page_size)  # a chunk is at least a page
                beside = [*prefilling, request]
                short = self._admit(overtaking, share, step, beside, only_reserved=only_reserved)
                admitted += short
                budget -= _n_tokens(short)
                prefilling = self._running.prefilling()
                if short and request.reads_cache:
                    self._cache.extend(request.blocks, request.lookup_key)
            row = self._prefill_row(request, budget, step)
            if row is None:
                self._running.free(request)
                if request.phase is Phase.LOADING:
                    self._waiting.add(request)
                break
            if request.phase is Phase.WAITING:
                self._waiting.remove(request)
            self._running.start(request)
            budget -= row.n_tokens
            if request.n_scheduled < request.n_known:
                prefilling.append(request)
            admitted.append(PlannedRow(request, row))
            if budget <= 0 or not self._running.has_free_batch_slot:
                break
        return admitted

    def _lacks_common_pages(self, request: Request) -> bool:
        """Whether a request that does not fit could use pages that are reserved for nobody: it lacks no row, and
        its sender is not at its cap of pages."""
        return self._running.has_batch_slot_for(request) and not self._shares.is_capped(request)

    @property
    def _n_unpromised(self) -> int:
        return self._cache.n_available - self._tiers.n_promised

    def _is_blocked(self) -> bool:
        """Whether a waiting request did not fit, and nothing has changed since that could let one in.

        Such changes are: more available or fewer promised pages, fewer running requests, a prompt that is fully
        planned, another queue. Without them the queue is not ranked again. A change of the tree that would let one
        in is missed.
        """
        if self._waiting.is_common and self.refused is not None:
            return True
        if self._blocked is None:
            return False
        n_unpromised, n_running, version = self._blocked
        has_changed = self._n_unpromised > n_unpromised or len(self._running) < n_running
        return not has_changed and self._waiting.version == version

    def _prefill_row(self, request: Request, budget: int, step: int) -> Row | None:
        """Makes the row of a prompt's next chunk and commits its pages; None if budget or pages do not suffice, or
        an eviction waits for a result.

        Every chunk that the budget ends does so on a page boundary, if it can on one that ``States`` asks for. A
        chunk starts within a page if a cached page begins with the same tokens: the row's plan must then copy that
        page, see ``PageCache.copy_partial_page``.
        """
        blocks, page_size, eviction = request.blocks, self._cache.page_size, request.kv_eviction
        if eviction is not None and request.n_scheduled >= request.n_prompt and not eviction.make_room(request):
            return None
        last = _row_limit(request)
        reads_cache = request.reads_cache and not blocks.skipped
        if reads_cache:
            n_cached = min(blocks.n_leased * page_size, last - 1)
            request.n_scheduled = max(request.n_scheduled, n_cached)
        end = min(last, request.n_scheduled + budget)
        if end < last:
            end -= end % page_size
            block_end = end - end % self._states.block_tokens
            end = block_end if block_end > request.n_scheduled else end
        if end <= request.n_scheduled or not self._running.grow(request, end):
            return None
        start = request.n_scheduled
        # This comes after ``grow``: an earlier lease on the page to copy could hold the only page that can be
        # evicted.
        if reads_cache and start == blocks.n_leased * page_size:
            start += self._cache.copy_partial_page(blocks, request.known_key, last - 1)
            if start > request.n_scheduled:
                request.cache_use.note("copied", request.n_scheduled, start)
        # The next lines come before the commit: afterwards a match would find the prompt's own pages.
        if request.phase is Phase.WAITING:
            self._running.count_hit(request)
        is_first = request.first_row is None
        miss = find_miss(self._cache, request, start) if is_first else None
        n_in_tree = self._cache.commit(blocks, request.known_key, end, request.last_step)
        write_start = min(end, max(start, n_in_tree * page_size))
        if blocks.n_leased > n_in_tree:
            request.cache_use.note("added", n_in_tree * page_size, blocks.n_leased * page_size)
        if is_first:
            request.first_row = FirstRow(self._clock(), miss)
        self.n_recomputed += max(0, min(end, request.recovery.n_lost) - start)
        self._waiting.charge((request,), end - start)
        self._states.plan_row(request, start, end, n_in_tree * page_size)
        return request.make_row(start, end, write_start, step)


def _row_limit(request: Request) -> int:
    """Returns where a prompt's next row ends at the latest: after its known tokens, or where pages may go. O(1)."""
    eviction = request.kv_eviction
    return request.n_known if eviction is None else min(request.n_known, eviction.row_limit(request))


def _n_left(request: Request) -> int:
    """Returns how many tokens a prompt's next row can have. O(1)."""
    return _row_limit(request) - request.n_scheduled


def _n_tokens(rows: Iterable[PlannedRow]) -> int:
    return sum(planned.row.n_tokens for planned in rows)


def _fair_share(demands: Sequence[int], budget: int) -> int:
    """Returns the fair share of one more prompt in a budget; ``demands`` are those of the others, ascending."""
    for n_done, demand in enumerate(demands):
        share = budget // (len(demands) - n_done + 1)
        if demand > share:
            return share
        budget -= demand
    return budget
