"""The scheduler: (waiting, running, cache) -> StepPlan, and what a step's result means. Pure policy.

A step carries every running row's next token, and chunks of prompts up to a token budget. Plans overlap: the next
one is made before the last one's result is known, so a decode row may continue a token that is still on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import NamedTuple

from radixkv.config import SchedulerConfig
from radixkv.errors import DeviceFailure, InvariantError, NumericalFailure, QueueFull, RequestError
from radixkv.runtime.cache import PageCache
from radixkv.runtime.plan import Row, StepPlan, StepResult
from radixkv.runtime.request import TOKEN_BYTES, Holding, Phase, Request
from radixkv.runtime.waiting import WaitingQueue


class Update(NamedTuple):
    """What a step's end means for one request: a token, its end, or both."""

    request: Request
    token: int | None
    finish_reason: str | None = None
    """``stop`` or ``length``."""
    error: RequestError | None = None


class _Launched(NamedTuple):
    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Turns requests into steps, and steps into tokens.

    ``schedule`` makes the next plan, which counts as launched; ``complete`` and ``fail`` take results, oldest plan
    first. Cancels and retractions act between plans: a row that committed stays in its plan, and a request whose
    pages a launched step uses *drains* before they go back.
    """

    def __init__(
        self, cache: PageCache, config: SchedulerConfig, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self.cache = cache
        self.waiting = WaitingQueue(
            cache, policy=config.schedule_policy, window=config.lpm_window, max_passes=config.lpm_max_passes
        )
        self.n_preemptions = 0
        """Retractions for want of pages."""
        self._clock = clock
        self._max_rows = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._max_waiting = config.max_queued_requests
        self._running: list[Request] = []
        self._draining: dict[Request, None] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._launched: deque[_Launched] = deque()
        self._blocked: tuple[int, int, int] | None = None
        """Pages available, rows and queue when a request last did not fit."""
        self._n_requests = 0
        self._n_steps = 0

    @property
    def n_running(self) -> int:
        """Requests with a slot that go on."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or drains."""
        return not (self.waiting or self._running or self._draining)

    def holdings(self) -> list[Holding]:
        """Every open holding. O(running)."""
        return [r.holding for r in (*self._running, *self._draining) if r.holding is not None]

    def add(self, request: Request) -> None:
        """Queues a new request. O(log waiting). Raises ``QueueFull``."""
        if len(self.waiting) >= self._max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests wait already, the most that this server queues; try later"
            )
        request.serial = self._n_requests
        self._n_requests += 1
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """Ends a live request; its pages go back once no launched step uses them. O(running)."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.phase = Phase.ENDED
        else:
            self._end(request)
            self._drain()

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if nothing can run before an older plan ends. O(running + admissions)."""
        rows: list[Row] = []
        requests: list[Request] = []
        prefilling = []
        for request in tuple(self._running):
            if request.phase is not Phase.RUNNING or request.is_sampled_out:
                continue
            if not request.is_decoding:
                prefilling.append(request)
            elif self._make_room(request, request.n_scheduled + 1):
                rows.append(self._row(request, 1, request.n_scheduled))
                requests.append(request)
        budget = self._max_tokens - len(rows)
        for request in prefilling:
            row = self._chunk(request, budget) if request.phase is Phase.RUNNING else None
            if row is not None:
                rows.append(row)
                requests.append(request)
                budget -= row.n_tokens
        if self.waiting and self._free_slots and budget > 0:
            for request, row in self._admit(budget):
                rows.append(row)
                requests.append(request)
        if not rows:
            return None
        plan = StepPlan(self._n_steps, tuple(rows))
        self._launched.append(_Launched(plan, requests))
        self._n_steps += 1
        return plan

    def complete(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Takes the oldest plan's result. O(rows)."""
        launched = self._launched.popleft()
        assert launched.plan is plan, "results come in the order of the plans"
        updates: list[Update] = []
        rows = list(zip(plan.rows, launched.requests, result.tokens, result.finite, strict=True))
        for row, request, _, finite in rows:
            request.n_in_flight -= 1
            request.n_sampling -= row.sampling is not None
            if finite and not request.discards:
                self.cache.settle(_held(request), row.start + row.n_tokens, step=plan.step)
        for _, request, _, finite in rows:
            if not finite:
                updates += self._quarantine(request)
        for row, request, token, finite in rows:
            if finite and row.sampling is not None and request.phase is not Phase.ENDED and not request.discards:
                updates.append(self._accept(request, row, token, plan.step))
            self.cache.reap(_held(request), plan.step)
        self._drain()
        return updates

    def fail(self) -> list[Update]:
        """All launched plans failed: what they were to write is made unreachable, newest first, and their requests
        go back to the queue. They are retried in steps of half as many rows; one whose step of one row fails again
        ends in error, so that a request that breaks its steps takes no other along. O(running)."""
        involved: dict[Request, None] = {}
        while self._launched:
            launched = self._launched.pop()
            for row, request in zip(reversed(launched.plan.rows), reversed(launched.requests), strict=True):
                request.n_in_flight -= 1
                request.n_sampling -= row.sampling is not None
                involved[request] = None
        for request in self._detach(involved):
            if request not in involved:
                self._requeue(request)
        updates = []
        live = [request for request in involved if request.phase is not Phase.ENDED]
        for request in sorted(live, key=lambda r: r.serial):
            if request.trial_rows == 1:
                self._end(request)
                error = DeviceFailure("the device failed on this request, and again when it ran alone")
                updates.append(Update(request, None, error=error))
            else:
                request.trial_rows = max(1, len(live) // 2)
                self._requeue(request)
        self._drain()
        return updates

    def check(self) -> None:
        """Every invariant of pages and tree; when idle, also that nobody holds a page. O(pages).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.cache.check(self.holdings())
        n_held = self.cache.n_pages - self.cache.n_available
        if self.is_idle and n_held:
            raise InvariantError(f"nothing runs, but {n_held} pages are leased, detached or held")

    def _admit(self, budget: int) -> list[tuple[Request, Row]]:
        admitted: list[tuple[Request, Row]] = []
        if self._is_blocked():
            return admitted
        most_rows = min((r.trial_rows for r in self._running if r.trial_rows), default=self._max_rows)
        for request in self.waiting.candidates():
            most_rows = min(most_rows, request.trial_rows or most_rows)
            if budget <= 0 or not self._free_slots or len(self._running) >= most_rows:
                break
            if not self._open(request):
                self._blocked = (self.cache.n_available, len(self._running), len(self.waiting))
                break
            row = self._chunk(request, budget)
            if row is None:
                self._close(request)
                break
            self.waiting.remove(request)
            request.phase = Phase.RUNNING
            self._running.append(request)
            budget -= row.n_tokens
            admitted.append((request, row))
        if admitted:
            self.waiting.count_passes(request for request, _ in admitted)
        return admitted

    def _is_blocked(self) -> bool:
        """Whether nothing has changed for the better since a request did not fit: no more pages, no fewer rows, the
        same queue. Then the queue need not be ranked again."""
        if self._blocked is None:
            return False
        n_available, n_running, n_waiting = self._blocked
        return (
            self.cache.n_available <= n_available
            and len(self._running) >= n_running
            and len(self.waiting) == n_waiting
        )

    def _open(self, request: Request) -> bool:
        """Leases first; then there must be room for the rest and one page for each running row."""
        holding = self.cache.open(
            request.namespace, request.key, reads=request.reads_cache, private=request.private
        )
        n_needed = request.n_prompt + request.max_tokens - 1 if request.returned else request.n_known
        n_pages = max(0, self.cache.pages_for(n_needed) - holding.n_leased)
        if n_pages + len(self._running) > self.cache.n_available:
            self.cache.close(holding)
            return False
        request.holding = holding
        request.slot = self._free_slots.pop()
        return True

    def _close(self, request: Request) -> None:
        self.cache.close(_held(request))
        request.holding = None
        self._free_slots.append(request.slot)
        request.slot = -1
        request.n_scheduled = 0

    def _chunk(self, request: Request, budget: int) -> Row | None:
        """The next chunk of a prompt, committed; chunks but the last end on a page boundary."""
        holding, page_size = _held(request), self.cache.page_size
        if request.reads_cache:
            self.cache.extend(holding, request.tokens)
            n_cached = min(holding.n_leased * page_size, request.n_known - 1)
            request.n_scheduled = max(request.n_scheduled, n_cached)
        end = min(request.n_known, request.n_scheduled + budget)
        if end < request.n_known:
            end -= end % page_size
        if end <= request.n_scheduled or not self._make_room(request, end):
            return None
        n_in_tree = self.cache.commit(holding, request.tokens, end, step=self._n_steps, last_read=request.last_step)
        write_start = min(end, max(request.n_scheduled, n_in_tree * page_size))
        return self._row(request, end - request.n_scheduled, write_start)

    def _make_room(self, request: Request, n_tokens: int) -> bool:
        """Pages for so many tokens: evicts, then retracts whoever arrived last, never the oldest."""
        holding, n_pages = _held(request), self.cache.pages_for(n_tokens)
        if n_pages <= len(holding.table):
            return True
        while not self.cache.reserve(holding, n_pages):
            if self._draining or len(self._running) < 2:
                return False
            victim = max(self._running, key=lambda running: running.serial)
            victim.returned = True
            self.n_preemptions += 1
            self._requeue(victim, discards=False)
            self._drain()
            if victim is request:
                return False
        return True

    def _row(self, request: Request, n_tokens: int, write_start: int) -> Row:
        holding = _held(request)
        start, end = request.n_scheduled, request.n_scheduled + n_tokens
        known = bytes(request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]) if end <= request.n_known else None
        samples = end == request.n_known + request.n_sampling
        row = Row(
            slot=request.slot,
            start=start,
            n_tokens=n_tokens,
            tokens=known,
            write_start=write_start,
            table_start=holding.n_sent,
            table_pages=tuple(holding.table[holding.n_sent :]),
            sampling=request.next_sampling() if samples else None,
        )
        holding.n_sent = len(holding.table)
        if request.scheduled_at is None:
            request.scheduled_at = self._clock()
        if request.n_cached is None and start < request.n_prompt:
            request.computed.append((start, min(end, request.n_prompt)))
        request.n_scheduled = end
        request.n_sampling += samples
        request.n_in_flight += 1
        request.last_step = self._n_steps
        return row

    def _accept(self, request: Request, row: Row, token: int, step: int) -> Update:
        """Appends a token; commits the pages that the answer has filled."""
        request.tokens += token.to_bytes(TOKEN_BYTES, "little")
        request.trial_rows = None
        if request.n_cached is None:
            request.count_cached()
        holding, end = _held(request), row.start + row.n_tokens
        if end // self.cache.page_size > holding.n_leased and not holding.detached:
            self.cache.commit(holding, request.tokens, end, step=step, last_read=request.last_step)
            self.cache.settle(holding, end, step=step)
        reason = None
        if token in request.stop_token_ids:
            reason = "stop"
        elif request.n_outputs == request.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(request)
        return Update(request, token, reason)

    def _quarantine(self, request: Request) -> list[Update]:
        """A row was not finite: what no finite row has covered leaves the tree, and its readers start again; the
        request itself is tried once more without the tree."""
        for reader in self._detach([request]):
            if reader is not request and reader.phase is not Phase.ENDED:
                self._requeue(reader)
        if request.phase is Phase.ENDED or request.discards:
            return []
        if request.private:
            self._end(request)
            text = "the model gave non-finite numbers for this request, also when computed without the cache"
            return [Update(request, None, error=NumericalFailure(text))]
        request.private = True
        self._requeue(request)
        return []

    def _detach(self, requests: Iterable[Request]) -> list[Request]:
        """Detaches what is unsettled on the requests' paths; returns whose path leads through it. O(running)."""
        broken = [node for request in requests if (node := self.cache.detach_unsettled(_held(request))) is not None]
        return [r for r in (*self._running, *self._draining) if self.cache.leads_through(_held(r), broken)]

    def _end(self, request: Request) -> None:
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        request.phase = Phase.ENDED
        self._draining[request] = None

    def _requeue(self, request: Request, *, discards: bool = True) -> None:
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        request.phase = Phase.RETURNING
        request.discards |= discards
        self._draining[request] = None

    def _drain(self) -> None:
        """Takes back the pages of draining requests that no launched step uses. O(draining)."""
        for request in [request for request in self._draining if not request.n_in_flight]:
            del self._draining[request]
            self._close(request)
            request.discards = False
            if request.phase is Phase.RETURNING:
                request.phase = Phase.WAITING
                self.waiting.add(request)


def _held(request: Request) -> Holding:
    assert request.holding is not None, "a request that runs or drains holds pages"
    return request.holding
