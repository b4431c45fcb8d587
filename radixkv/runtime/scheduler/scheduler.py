"""The scheduler: (waiting, running, cache) -> StepPlan, and what a step's result means. Pure policy.

A step carries every running row's next token, and chunks of prompts up to a token budget. Plans overlap: the next
one is made before the last one's result is known, so a decode row may continue a token that is still on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from time import monotonic
from typing import NamedTuple

from radixkv.config import SchedulerConfig
from radixkv.errors import InvariantError, QueueFull, QueueTimeout
from radixkv.runtime.cache.cache import ComputedRow, PageCache
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.retry import retry_without_tree, undo_steps
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire import TokenLogprobs


class _Launched(NamedTuple):
    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Turns requests into steps, and steps into tokens.

    ``schedule`` makes the next plan, which counts as launched; ``complete`` and ``fail`` take results, oldest plan
    first. Cancels and retractions act between plans: a row that committed stays in its plan, and a request whose
    pages a launched step uses *drains* before they go back.

    Args:
        cache: over the device's pool.
        config: bounds of steps and queue.
        finds_shared_runs: whether plans say which pages the rows that continue an answer share.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PageCache,
        config: SchedulerConfig,
        *,
        finds_shared_runs: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        # The settings that depend on the device were filled in: ``config.with_defaults``.
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        self.cache = cache
        self.waiting = WaitingQueue(
            cache, policy=config.schedule_policy, window=config.lpm_window, max_passes=config.lpm_max_passes
        )
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.running = RunningRequests(cache, self.waiting, config.max_num_seqs)
        self.n_preemptions = 0
        """Retractions for want of pages."""
        self._shared = SharedPrefixes(cache) if finds_shared_runs else None
        self._clock = clock
        self._max_waiting = config.max_queued_requests
        self._queue_timeout_s = config.queue_timeout_s
        self._launched: deque[_Launched] = deque()
        self._blocked: tuple[int, int, int] | None = None
        """Pages available, rows and the queue's version when a request last did not fit; None after the last chunk
        of a prompt."""
        self._n_requests = 0
        self._n_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or drains."""
        return not (self.waiting or self.running or self.running.is_releasing)

    def add(self, leader: Request, followers: Sequence[Request] = ()) -> None:
        """Queues a new request: the choice that leads, and those that follow it. O(log waiting).

        Raises:
            QueueFull: as many wait for their first step as may; followers do not count, nor do retracted ones.
        """
        if self.waiting.n_unstarted >= self._max_waiting:
            raise QueueFull(
                f"{self.waiting.n_unstarted} requests wait already, the most that this server queues; try later"
            )
        leader.take_followers(followers)
        for choice in (leader, *followers):
            choice.serial = self._n_requests
            self._n_requests += 1
        self.waiting.add(leader)

    def abort(self, request: Request) -> None:
        """Ends a live request; its pages go back once no step uses them. If others follow it, the next one leads.
        O(running)."""
        if request.phase is Phase.FOLLOWING:
            assert request.leader is not None
            request.leader.followers.remove(request)
            request.leader = None
            request.phase = Phase.ENDED
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.phase = Phase.ENDED
        else:
            self.running.end(request)
            self.running.release()
        if request.followers:
            self.waiting.add(request.hand_over())

    def expire(self) -> list[Update]:
        """Ends those that have waited too long for their first step; never one that has run. O(1) if none has."""
        updates: list[Update] = []
        if self._queue_timeout_s is None:
            return updates
        now = self._clock()
        while oldest := self.waiting.oldest_unstarted():
            waited_s = now - oldest.received_at
            if waited_s <= self._queue_timeout_s:
                break
            self.waiting.remove(oldest)
            oldest.phase = Phase.ENDED
            error = QueueTimeout(
                f"the request waited {waited_s:.1f} s for its first step; this server lets none wait longer than "
                f"{self._queue_timeout_s:g} s; try later"
            )
            updates.append(Update(oldest, error=error))
        return updates

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if nothing can run before an older plan ends. O(running + admissions), and
        ``WaitingQueue.candidates`` where one may be admitted.

        Requests that are retried after a failed step share no plan, and no time, with others: if it fails again,
        it is known whose it was. The others pause meanwhile, unless none of the former fits.
        """
        if self._has_retries():
            if self._launched:
                return None
            if (plan := self._plan(retrying=True)) is not None:
                return plan
        return self._plan(retrying=False)

    def complete(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Takes the oldest plan's result. O(rows)."""
        launched = self._launched.popleft()
        assert launched.plan is plan, "results come in the order of the plans"
        updates: list[Update] = []
        rows = list(zip(plan.rows, launched.requests, result.tokens, result.finite, strict=True))
        covered: list[ComputedRow] = []
        for row, request, _, finite in rows:
            self._land(request, row)
            if finite and not request.discards_results:
                blocks, end = request.blocks, row.start + row.n_tokens
                fills_page = end >= (blocks.n_leased + 1) * self.cache.page_size and blocks.can_commit
                if request.phase is Phase.ENDED:
                    self.cache.mark_computed(blocks, end, plan.step)
                elif fills_page or not blocks.is_computed:
                    covered.append(ComputedRow(blocks, request.tokens, end, request.last_step))
        self.cache.commit_computed(covered, plan.step)
        if not all(result.finite):
            for _, request, _, finite in rows:
                if not finite:
                    updates += retry_without_tree(self.cache, self.running, request)
        for index, (row, request, token, finite) in enumerate(rows):
            if finite and request.phase is not Phase.ENDED and not request.discards_results:
                # After one of a prompt's rows it is not known yet whether it can go on.
                if request.max_retry_rows is not None and row.n_tokens == 1 and row.sampling is not None:
                    self.running.end_retry(request)
                scores = result.scores[index] if result.scores else None
                if scores and (stretch := request.take_scores(row.start, scores)):
                    updates.append(Update(request, scores=stretch))
                if row.sampling is not None:
                    logprobs = result.logprobs[index] if result.logprobs else None
                    updates.append(self._append_token(request, token, logprobs))
            blocks = request.blocks
            if blocks.replaced and not request.n_pending_copies:
                self.cache.free_replaced(blocks, plan.step)
        self.running.release()
        return updates

    def fail(self) -> list[Update]:
        """All launched plans failed: they are undone, newest first. O(running)."""
        involved: list[Request] = []
        while self._launched:
            launched = self._launched.pop()
            for row, request in zip(reversed(launched.plan.rows), reversed(launched.requests), strict=True):
                self._land(request, row)
                involved.append(request)
        updates = undo_steps(self.cache, self.running, involved)
        self.running.release()
        return updates

    def check(self) -> None:
        """Every invariant of pages and tree; when idle, also that nobody holds a page. O(pages).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.cache.check(self.running.block_tables())
        n_held = self.cache.n_pages - self.cache.n_available
        if self.is_idle and n_held:
            raise InvariantError(f"nothing runs, but {n_held} pages are leased, detached or held")

    def _has_retries(self) -> bool:
        """Whether some are retried, or could be."""
        return self.running.has_retries or (
            self.waiting.has_retries and self.running.has_batch_slot and not self._is_blocked()
        )

    def _plan(self, *, retrying: bool) -> StepPlan | None:
        """A step of those on trial, or of the others; None if it would have no rows."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            if not request.reaches_max_tokens and (request.max_retry_rows is not None) is retrying:
                (decoding if request.is_decoding else prefilling).append(request)
        rows, requests = self._decode_rows(decoding)
        n_decoding = len(rows)
        budget = self.max_num_batched_tokens - n_decoding
        for request in prefilling:
            if request.phase is not Phase.RUNNING:
                continue
            if request.reads_cache:
                self.cache.extend(request.blocks, request.tokens)
            row = self._prefill_row(request, budget)
            if row is not None:
                rows.append(row)
                requests.append(request)
                budget -= row.n_tokens
                if request.n_scheduled == request.n_known:
                    self._blocked = None  # those with the same prompt need no more room for it
        if self.waiting and self.running.has_batch_slot and budget > 0 and (retrying or not self._is_blocked()):
            for request, row in self._admit(self._candidates(retrying=retrying), budget):
                rows.append(row)
                requests.append(request)
        if not rows:
            return None
        shared = () if self._shared is None else self._shared.find(requests[:n_decoding])
        plan = StepPlan(self._n_steps, tuple(rows), _take_copies(requests), shared)
        self._launched.append(_Launched(plan, requests))
        self._n_steps += 1
        return plan

    def _decode_rows(self, decoding: list[Request]) -> tuple[list[Row], list[Request]]:
        """The next tokens' rows, and whose they are: of those for whom there are pages."""
        page_size = self.cache.page_size
        full = [r.blocks for r in decoding if r.n_scheduled == len(r.blocks.pages) * page_size]
        has_pages = self.cache.append_pages(full)  # all at once, where nobody has to give way
        rows: list[Row] = []
        requests: list[Request] = []
        for request in decoding:
            start = request.n_scheduled
            if has_pages or (request.phase is Phase.RUNNING and self._make_room(request, start + 1)):
                rows.append(request.make_row(start, start + 1, start, self._n_steps))
                requests.append(request)
        return rows, requests

    def _candidates(self, *, retrying: bool) -> Iterator[Request]:
        """Those on trial that may be retried now, or all others, in the order in which to try them."""
        if retrying:
            return takewhile(self.running.can_join_retry, self.waiting.retries())
        return (request for request in self.waiting.candidates() if request.max_retry_rows is None)

    def _admit(self, candidates: Iterable[Request], budget: int) -> list[tuple[Request, Row]]:
        """Those that fit beside what running prompts have yet to take."""
        prompts = self.running.prompts()
        admitted: list[tuple[Request, Row]] = []
        for request in candidates:
            if budget <= 0 or not self.running.has_batch_slot:
                break
            if not self.running.open(request, prompts):
                self._blocked = (self.cache.n_available, len(self.running), self.waiting.version)
                break
            row = self._prefill_row(request, budget)
            if row is None:
                self.running.close(request)
                break
            self.waiting.remove(request)
            self.running.start(request)
            budget -= row.n_tokens
            if request.n_scheduled < request.n_known:
                prompts.append(request)
            admitted.append((request, row))
        if admitted:
            self.waiting.count_passes(request for request, _ in admitted)
        return admitted

    def _is_blocked(self) -> bool:
        """Whether a request did not fit, and there are no more pages since, no fewer rows, no prompt that is whole,
        and the same queue. Then the queue is not ranked again; rarely, a change of the tree would let one in."""
        if self._blocked is None:
            return False
        n_available, n_running, version = self._blocked
        return (
            self.cache.n_available <= n_available
            and len(self.running) >= n_running
            and self.waiting.version == version
        )

    def _prefill_row(self, request: Request, budget: int) -> Row | None:
        """The next chunk of a prompt, committed; chunks but the last end on a page boundary."""
        blocks, page_size = request.blocks, self.cache.page_size
        if request.reads_cache:
            n_cached = min(blocks.n_leased * page_size, request.n_known - 1)
            request.n_scheduled = max(request.n_scheduled, n_cached)
        end = min(request.n_known, request.n_scheduled + budget)
        if end < request.n_known:
            end -= end % page_size
        if end <= request.n_scheduled or not self._make_room(request, end):
            return None
        n_in_tree = self.cache.commit(blocks, request.tokens, end, request.last_step)
        write_start = min(end, max(request.n_scheduled, n_in_tree * page_size))
        if request.scheduled_at is None:
            request.scheduled_at = self._clock()
        return request.make_row(request.n_scheduled, end, write_start, self._n_steps)

    def _make_room(self, request: Request, n_tokens: int) -> bool:
        """Pages for so many tokens: evicts, then retracts the last in order, never the first."""
        blocks = request.blocks
        if n_tokens <= len(blocks.pages) * self.cache.page_size:
            return True
        n_pages = self.cache.pages_for(n_tokens)
        while not self.cache.reserve(blocks, n_pages):
            if self.running.is_releasing or len(self.running) < 2:
                return False
            victim = max(self.running, key=lambda running: running.order)
            self.n_preemptions += 1
            self.running.requeue(victim, discards_results=False)
            self.running.release()
            if victim is request:
                return False
        return True

    def _land(self, request: Request, row: Row) -> None:
        """A launched row is done or has failed, and with it the copies that it may have waited for."""
        request.row_done(row)
        if request.leader is not None:
            self.running.end_copies(request)

    def _append_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Update:
        """Appends a token; lets the other choices fork."""
        request.tokens += token.to_bytes(TOKEN_BYTES, "little")
        if request.n_cached is None:
            request.count_cached()
        request.reads_cache = True
        if request.followers:
            self.running.fork(request)
        reason = None
        if token in request.stop_token_ids:
            reason = "stop"
        elif request.n_known == request.n_prompt + request.max_tokens:
            reason = "length"
        if reason is not None:
            self.running.end(request)
        return Update(request, token, reason, logprobs=logprobs)


def _take_copies(requests: list[Request]) -> tuple[tuple[int, int], ...]:
    """The page copies of the forks whose first row this is."""
    copies: list[tuple[int, int]] = []
    for request in requests:
        if request.leader is not None:
            blocks = request.blocks
            copies += blocks.copies
            blocks.copies = []
    return tuple(copies)
