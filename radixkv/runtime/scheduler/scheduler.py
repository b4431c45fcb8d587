"""The scheduler: pure policy that turns (waiting, running, cache) into step plans, and step results into updates.

A step computes the next token of every decoding request, and chunks of prompts up to a token budget. Steps overlap:
the next plan is made before the last step's result is known, so a decode row may continue from a token that is only
on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

from radixkv.config import SchedulePolicy, SchedulerConfig
from radixkv.errors import InvariantError, QueueFull, QueueTimeout
from radixkv.runtime.cache.cache import ComputedRow, PageCache
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.recovery import RetryQueue, recompute_without_tree, undo_steps
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.shared_prefixes import MIN_SHARED_TOKENS, SharedPrefixes
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire import TokenLogprobs


class PlannedRow(NamedTuple):
    """A prompt's row of the next plan, and its request."""

    request: Request
    row: Row


class LaunchedPlan(NamedTuple):
    """A plan whose result is not known yet, and the request of each of its rows."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Turns requests into step plans, and step results into tokens.

    ``schedule`` makes the next plan. A plan counts as launched until ``complete`` takes its result, oldest plan
    first, or ``fail`` undoes all launched plans. Aborts and preemptions act between plans: a row that has committed
    its pages stays in its plan, and a request is *releasing* until no launched step uses its pages.

    Args:
        cache: the page cache over the device's pool.
        max_num_seqs: maximum rows of a step.
        max_num_batched_tokens: maximum tokens of a step.
        schedule_policy, lpm_window, lpm_max_passes: the order of admission, as in ``SchedulerConfig``.
        max_queued_requests, queue_timeout_s: the limits of the queue, as in ``SchedulerConfig``.
        finds_shared_runs: whether plans list the pages that decode rows share.
        min_shared_tokens: length of the shortest run of shared pages that plans list.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PageCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        schedule_policy: SchedulePolicy = SchedulerConfig.schedule_policy,
        lpm_window: int = SchedulerConfig.lpm_window,
        lpm_max_passes: int = SchedulerConfig.lpm_max_passes,
        max_queued_requests: int = SchedulerConfig.max_queued_requests,
        queue_timeout_s: float | None = None,
        finds_shared_runs: bool = False,
        min_shared_tokens: int = MIN_SHARED_TOKENS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.cache = cache
        self.waiting = WaitingQueue(cache, policy=schedule_policy, window=lpm_window, max_passes=lpm_max_passes)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running = RunningRequests(cache, self.waiting, max_num_seqs)
        self.n_preemptions = 0
        """Preemptions for lack of pages since the start; those for retries do not count."""
        self._shared_prefixes = SharedPrefixes(cache, min_tokens=min_shared_tokens) if finds_shared_runs else None
        self._clock = clock
        self._max_queued_requests = max_queued_requests
        self._queue_timeout_s = queue_timeout_s
        self._launched: deque[LaunchedPlan] = deque()
        self._retried = RetryQueue()
        self._refused: Request | None = None
        """The retried request that last did not fit; no other is admitted before it."""
        self._blocked: tuple[int, int, int] | None = None
        """(available pages, running requests, queue version) when a waiting request last did not fit.

        None if no request was refused since a prompt's last chunk was planned."""
        self._n_requests = 0
        self._n_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting, running or releasing."""
        return not (self.waiting or self.running or self.running.is_releasing)

    @property
    def launched_plans(self) -> tuple[LaunchedPlan, ...]:
        """The plans whose results are not known yet, oldest first. O(launched plans)."""
        return tuple(self._launched)

    def add(self, leader: Request, followers: Sequence[Request] = ()) -> None:
        """Queues a new request: the leading choice, and the choices that fork from it. O(log waiting + tokens).

        Raises:
            QueueFull: ``max_queued_requests`` requests wait for their first step. Followers and preempted requests
                do not count.
        """
        if (n_waiting := self.waiting.n_unstarted) >= self._max_queued_requests:
            raise QueueFull(f"the queue is full: {n_waiting} requests wait for their first step; try later")
        leader.set_followers(followers)
        for choice in (leader, *followers):
            choice.serial = self._n_requests
            self._n_requests += 1
        self.waiting.add(leader)

    def abort(self, request: Request) -> None:
        """Finishes an unfinished request; its pages are freed once no launched step uses them.

        If it has followers, the first of them becomes the leader. O(running).
        """
        if request.phase is Phase.FOLLOWING:
            assert request.leader is not None
            request.leader.followers.remove(request)
            request.leader = None
            request.phase = Phase.FINISHED
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.phase = Phase.FINISHED
        else:
            self.running.finish(request)
            self.running.release()
        if request.followers:
            self.waiting.add(request.promote_follower())

    def expire(self) -> list[Update]:
        """Fails the requests that have waited longer than ``queue_timeout_s`` for their first step.

        A request that has run never times out. O(1) if none times out.
        """
        if self._queue_timeout_s is None:
            return []
        updates: list[Update] = []
        now = self._clock()
        for request in self.waiting.take_received_before(now - self._queue_timeout_s):
            request.phase = Phase.FINISHED
            error = QueueTimeout(
                f"the request waited {now - request.received_at:.1f} s for its first step, longer than this "
                f"server's limit of {self._queue_timeout_s:g} s; try later"
            )
            updates.append(Update(request, error=error))
        return updates

    def schedule(self) -> StepPlan | None:
        """Makes the next plan; None if nothing can run before a launched step is done.

        While requests are retried after a failed step, every second plan is of one of them alone, and no two plans
        are in flight at once: if its step fails, the request is the cause.

        O(running + admissions), and ``WaitingQueue.candidates`` where a request may be admitted.
        """
        retried = self._retried.next()
        if retried is None:
            return self._plan_together()
        if self._launched:
            return None
        if self._n_steps % 2:
            return self._plan_together() or self._plan_alone(retried)
        return self._plan_alone(retried) or self._plan_together()

    def complete(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Takes the oldest launched plan's result: marks pages as computed, appends tokens, finishes requests.
        O(rows + new pages), and O(running) for each row that is not finite and each leader with followers."""
        launched = self._launched.popleft()
        assert launched.plan is plan, "results come in the order of the plans"
        updates: list[Update] = []
        rows = list(zip(plan.rows, launched.requests, result.tokens, result.finite, strict=True))
        computed: list[ComputedRow] = []
        for row, request, _, finite in rows:
            self._row_done(request, row)
            if finite and not request.discards_results:
                blocks, end = request.blocks, row.start + row.n_tokens
                fills_page = end >= (blocks.n_leased + 1) * self.cache.page_size and blocks.can_commit
                if request.phase is Phase.FINISHED:
                    self.cache.mark_computed(blocks, end, plan.step)
                elif fills_page or not blocks.is_computed:
                    computed.append(ComputedRow(blocks, request.tokens, end, request.last_step))
        self.cache.commit_computed(computed, plan.step)
        if not all(result.finite):
            for _, request, _, finite in rows:
                if not finite:
                    updates += recompute_without_tree(self.cache, self.running, request)
        for index, (row, request, token, finite) in enumerate(rows):
            if finite and request.phase is not Phase.FINISHED and not request.discards_results:
                # A row of a prompt does not end a retry: it does not show that decoding works.
                if request.is_retried and row.n_tokens == 1 and row.sampling is not None:
                    request.is_retried = False
                row_logprobs = result.prompt_logprobs[index] if result.prompt_logprobs else None
                if row_logprobs and (unreported := request.take_prompt_logprobs(row.start, row_logprobs)):
                    updates.append(Update(request, prompt_logprobs=unreported))
                if row.sampling is not None:
                    logprobs = result.logprobs[index] if result.logprobs else None
                    updates.append(self._append_token(request, token, logprobs))
            blocks = request.blocks
            if blocks.replaced and not request.n_pending_copies:
                self.cache.free_replaced(blocks, plan.step)
        self.running.release()
        return updates

    def fail(self) -> list[Update]:
        """Undoes all launched plans after a failure, newest first. O(running)."""
        involved: list[Request] = []
        while self._launched:
            launched = self._launched.pop()
            for row, request in zip(reversed(launched.plan.rows), reversed(launched.requests), strict=True):
                self._row_done(request, row)
                involved.append(request)
        updates = undo_steps(self.cache, self.running, involved)
        self._retried.add(involved)
        self.running.release()
        return updates

    def check(self) -> None:
        """Checks every invariant of pages and tree; when idle, also that no request holds a page. O(pages).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.cache.check(self.running.block_tables())
        n_held = self.cache.n_pages - self.cache.n_available
        if self.is_idle and n_held:
            raise InvariantError(f"no request is left, but {n_held} pages are leased, detached or in a tail")

    def _plan_alone(self, request: Request) -> StepPlan | None:
        """Plans a step of a retried request; None if it does not fit, or still releases its pages."""
        if request.phase is Phase.WAITING:
            plan = self._make_plan([], lambda budget: self._admit([request], budget))
            self._refused = request if plan is None else None
            return plan
        if request.phase is not Phase.RUNNING:
            return None
        if request.is_decoding:
            return self._make_plan([request], lambda _: [])
        return self._make_plan([], lambda budget: self._chunks([request], budget))

    def _plan_together(self) -> StepPlan | None:
        """Plans a step of all requests that are not retried alone; None if it would have no rows."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            if not (request.reaches_max_tokens or request.is_retried):
                (decoding if request.is_decoding else prefilling).append(request)
        return self._make_plan(decoding, lambda budget: self._prompt_rows(prefilling, budget))

    def _make_plan(
        self, decoding: list[Request], prompt_rows: Callable[[int], list[PlannedRow]]
    ) -> StepPlan | None:
        """Makes a plan of decode rows and prompt rows, which counts as launched; None if it would have no rows.

        Args:
            decoding: requests whose next token to compute.
            prompt_rows: makes the rows of prompts, of at most the given number of tokens.
        """
        requests, rows = self._decode_rows(decoding)
        n_decoding = len(rows)
        for request, row in prompt_rows(self.max_num_batched_tokens - n_decoding):
            requests.append(request)
            rows.append(row)
        if not rows:
            return None
        shared = () if self._shared_prefixes is None else self._shared_prefixes.find(requests[:n_decoding])
        plan = StepPlan(self._n_steps, tuple(rows), _take_copies(requests), shared)
        self._launched.append(LaunchedPlan(plan, requests))
        self._n_steps += 1
        return plan

    def _decode_rows(self, decoding: list[Request]) -> tuple[list[Request], list[Row]]:
        """Makes the rows of the decoding requests' next tokens; returns the requests that have one, and their rows.

        A request without a page for its next token gets no row.
        """
        page_size = self.cache.page_size
        full = [r.blocks for r in decoding if r.n_scheduled == len(r.blocks.pages) * page_size]
        has_pages = self.cache.append_pages(full)  # one call for all, if no request must be preempted
        requests: list[Request] = []
        rows: list[Row] = []
        for request in decoding:
            start = request.n_scheduled
            if has_pages or (request.phase is Phase.RUNNING and self._make_room(request, start + 1)):
                requests.append(request)
                rows.append(request.make_row(start, start + 1, start, self._n_steps))
        return requests, rows

    def _prompt_rows(self, prefilling: list[Request], budget: int) -> list[PlannedRow]:
        """Makes the rows of prompts: of those that are prefilling, and of waiting ones that are admitted.

        Prompts start in order, but none holds back shorter ones: where a step does not finish a prompt, a fair
        share of its budget goes to waiting prompts that have at most half as much to compute. So all prompts that
        are prefilled at once have together at most twice as much to compute as the longest. See
        docs/decisions/0019-fair-chunks.md.
        """
        prefilling = [one for one in prefilling if one.phase is Phase.RUNNING]  # not preempted by a decode row
        n_left = sorted(one.n_known - one.n_scheduled for one in prefilling)
        if sum(n_left) <= budget:
            chunks = self._chunks(prefilling, budget)
            admitted = self._admit(self._candidates(), budget - _n_tokens(chunks))
            rows = chunks + admitted
        else:
            share = min(_fair_share(n_left, budget), budget - self.cache.page_size)  # a chunk is at least a page
            unfinished = [one for one in prefilling if one.n_known - one.n_scheduled > share]
            shortest = min(one.n_known - one.n_scheduled for one in unfinished)
            max_priority = min(one.priority for one in unfinished)
            admitted = self._admit(self._overtaking(shortest // 2, max_priority), share)
            rows = admitted + self._chunks(prefilling, budget - _n_tokens(admitted))
        if admitted:
            self.waiting.count_passes([request for request, _ in admitted])
        return rows

    def _chunks(self, prefilling: list[Request], budget: int) -> list[PlannedRow]:
        """Makes the rows of prefilling prompts, which share the budget fairly: others get what one cannot use."""
        rows: list[PlannedRow] = []
        shortest_first = sorted(prefilling, key=lambda request: request.n_known - request.n_scheduled)
        for n_done, request in enumerate(shortest_first):
            if request.phase is not Phase.RUNNING:
                continue
            if request.reads_cache:
                self.cache.extend(request.blocks, request.tokens)
            share = max(budget // (len(prefilling) - n_done), min(budget, self.cache.page_size))
            row = self._prefill_row(request, share)
            if row is not None:
                rows.append(PlannedRow(request, row))
                budget -= row.n_tokens
                if request.n_scheduled == request.n_known:
                    self._blocked = None  # waiting requests with the same prompt need no pages for it any more
        return rows

    def _candidates(self) -> Iterator[Request]:
        """Yields waiting requests in the order in which to try to admit them; none while the queue is blocked."""
        if self.waiting and not self._is_blocked():
            yield from self.waiting.candidates()

    def _overtaking(self, n_tokens: int, max_priority: int) -> Iterator[Request]:
        """Yields waiting requests that have at most ``n_tokens`` to compute; none while the queue is blocked."""
        if self.waiting and not self._is_blocked():
            yield from self.waiting.short(n_tokens, max_priority)

    def _admit(
        self, candidates: Iterable[Request], budget: int, prefilling: list[Request] | None = None
    ) -> list[PlannedRow]:
        """Admits candidates in order until one does not fit, beside what prefilling requests still need.

        Half of what is left of the budget for a prompt that it does not finish goes to shorter prompts.

        Args:
            candidates: not started if nothing can be admitted, because ranking the queue takes long.
            budget: maximum tokens of the rows.
            prefilling: the prefilling requests; None for those that are running.
        """
        admitted: list[PlannedRow] = []
        if budget <= 0 or not self.running.has_free_batch_slot:
            return admitted
        if prefilling is None:
            prefilling = self.running.prefilling()
        for request in candidates:
            if request.block_table is not None:
                continue  # it has overtaken a candidate, or is the one that others overtake
            if not self.running.allocate(request, prefilling):
                self._blocked = (self.cache.n_available, len(self.running), self.waiting.version)
                break
            n_left = request.n_known - request.blocks.n_leased * self.cache.page_size
            if n_left > budget and not request.is_retried:  # a retried request stays alone
                overtaking = self._overtaking(n_left // 2, request.priority)
                share = min(budget // 2, budget - self.cache.page_size)  # a chunk is at least a page
                short = self._admit(overtaking, share, [*prefilling, request])
                admitted += short
                budget -= _n_tokens(short)
                prefilling = self.running.prefilling()
                if short and request.reads_cache:
                    self.cache.extend(request.blocks, request.tokens)
            row = self._prefill_row(request, budget)
            if row is None:
                self.running.free(request)
                break
            self.waiting.remove(request)
            self.running.start(request)
            budget -= row.n_tokens
            if request.n_scheduled < request.n_known:
                prefilling.append(request)
            admitted.append(PlannedRow(request, row))
            if budget <= 0 or not self.running.has_free_batch_slot:
                break
        return admitted

    def _is_blocked(self) -> bool:
        """Whether a waiting request did not fit, and nothing has changed since that could let one in.

        Such changes are: more available pages, fewer running requests, a prompt that is fully planned, another
        queue. Without them the queue is not ranked again. A change of the tree that would let one in is missed.
        """
        if self._refused is not None and self._refused.phase is Phase.WAITING:
            return True  # others would take each page that becomes free, and it would never start
        if self._blocked is None:
            return False
        n_available, n_running, version = self._blocked
        has_changed = self.cache.n_available > n_available or len(self.running) < n_running
        return not has_changed and self.waiting.version == version

    def _prefill_row(self, request: Request, budget: int) -> Row | None:
        """Makes the row of a prompt's next chunk and commits its pages; None if budget or pages do not suffice.

        Every chunk but the last ends on a page boundary.
        """
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
        """Gives the request pages for ``n_tokens``; False if it cannot.

        Evicts from the tree first, then preempts running requests from the last in order on. The first in order is
        never preempted, so one request always makes progress.
        """
        blocks = request.blocks
        if n_tokens <= len(blocks.pages) * self.cache.page_size:
            return True
        n_pages = self.cache.pages_for(n_tokens)
        while not self.cache.reserve(blocks, n_pages):
            if request.phase is not Phase.RUNNING or self.running.is_releasing or len(self.running) < 2:
                return False  # an admission preempts nothing
            victim = max(self.running, key=lambda running: running.order)
            self.n_preemptions += 1
            self.running.preempt(victim, discards_results=False)
            self.running.release()
            if victim is request:
                return False
        return True

    def _row_done(self, request: Request, row: Row) -> None:
        """Notes that a launched row is done or has failed, and with it the page copies before it."""
        request.row_done(row)
        if request.leader is not None:
            self.running.copies_done(request)

    def _append_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Update:
        """Appends a sampled token: forks the followers of a leader, finishes a request at its end."""
        request.tokens += token.to_bytes(TOKEN_BYTES, "little")
        if request.n_cached is None:
            request.count_cached()
        request.reads_cache = True
        if request.followers:
            self.running.fork_followers(request)
        reason = None
        if token in request.stop_token_ids:
            reason = "stop"
        elif request.n_known == request.n_prompt + request.max_tokens:
            reason = "length"
        if reason is not None:
            self.running.finish(request)
        return Update(request, token, reason, logprobs=logprobs)


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


def _take_copies(requests: list[Request]) -> tuple[tuple[int, int], ...]:
    """Takes the page copies of the forks whose first row is in this plan."""
    copies: list[tuple[int, int]] = []
    for request in requests:
        if request.leader is not None:
            copies += request.blocks.copies
            request.blocks.copies = []
    return tuple(copies)
