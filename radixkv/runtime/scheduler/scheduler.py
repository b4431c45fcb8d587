"""The scheduler: pure policy that turns (waiting, running, cache) into step plans, and step results into updates.

A step computes the next token of every decoding request, and chunks of prompts up to a token budget. Steps overlap:
the next plan is made before the last step's result is known, so a decode row may continue from a token that is only
on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from time import monotonic
from typing import NamedTuple

from radixkv.errors import InvariantError, QueueFull, queue_timeout
from radixkv.runtime.cache.block_table import ComputedRow
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.protocols.headroom import Headroom
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.request import Continuation
from radixkv.runtime.protocols.returns import Returns
from radixkv.runtime.protocols.shares import Shares
from radixkv.runtime.protocols.states import States
from radixkv.runtime.protocols.tiers import Tiers
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.prefill import PlannedRow, PrefillRows
from radixkv.runtime.scheduler.recovery import RetryQueue, recompute_without_tree, undo_steps
from radixkv.runtime.scheduler.row_drafts import RowDrafts
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.scheduler.verification import verify
from radixkv.runtime.step.plan import Row, SharedRun, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.step.step_time import StepTimeForecast
from radixkv.settings.config import SchedulerConfig
from radixkv.tree.node import TOKEN_BYTES, Lease
from radixkv.tree.spared import WaitingPrompt
from radixkv.wire.messages import TokenLogprobs, pack_tokens


class LaunchedPlan(NamedTuple):
    """A plan whose result is not known yet, and what it uses."""

    plan: StepPlan
    requests: list[Request]
    """The request of each row."""
    sources: list[Lease]
    """Leases on the tree's pages that the plan copies."""
    has_waited: bool
    """Whether it was made when the results of all plans before it were known."""

    def rows(self) -> list[tuple[Row, Request]]:
        """Returns the rows of the plan, each with its request. O(rows)."""
        return list(zip(self.plan.rows, self.requests, strict=True))


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of steps and of the queue; their meaning is that of ``SchedulerConfig``."""

    max_num_seqs: int
    """Maximum rows of a step."""
    max_num_batched_tokens: int
    """Maximum tokens of a step."""
    max_queued_requests: int = SchedulerConfig.max_queued_requests
    queue_timeout_s: float | None = None
    target_itl_ms: float | None = None
    num_reserved_decode_tokens: int = SchedulerConfig.num_reserved_decode_tokens
    max_reserved_decode_share: float = SchedulerConfig.max_reserved_decode_share
    splits_drafts: bool = False
    """Whether each draft takes one of the rows of a step, see ``Executor.splits_drafts``."""


class Scheduler:
    """Turns requests into step plans, and step results into tokens.

    ``schedule`` makes the next plan. A plan counts as launched until ``complete`` takes its result, oldest plan
    first, or ``fail`` undoes all launched plans. Aborts and preemptions act between plans: a row that has committed
    its pages stays in its plan, and a request is *releasing* until no launched step uses its pages.

    Args:
        cache: the page cache over the device's pool.
        limits: of steps and of the queue.
        queue: the waiting requests.
        shares: divides batch slots and pages among senders.
        tiers: the memory tiers behind the pool.
        drafts: guesses the tokens that follow.
        states: those of recurrent layers in the tree.
        returns: the conversations that are expected back.
        headroom: foresees the pages that running answers will need.
        shared_prefixes: finds the pages that decode rows share; None: plans list none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PageCache,
        limits: SchedulerLimits,
        queue: Queue,
        *,
        shares: Shares,
        tiers: Tiers,
        drafts: Drafts,
        states: States,
        returns: Returns,
        headroom: Headroom,
        shared_prefixes: SharedPrefixes | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting = queue
        self.shares = shares
        self.tiers = tiers
        self.drafts = drafts
        self.states = states
        self.returns = returns
        self.headroom = headroom
        self.running = RunningRequests(
            cache,
            queue,
            tiers,
            shares,
            states,
            headroom,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            n_reserved_tokens=limits.num_reserved_decode_tokens,
            max_reserved_share=limits.max_reserved_decode_share,
        )
        self._shared_prefixes = shared_prefixes
        cache.upcoming_prompts = self._next_prompts
        cache.expected_prompts = self._expected_prompts
        tiers.watch(self._next_prompts, returns.expected, self.running.n_unclaimed)
        self._clock = clock
        self.forecast = StepTimeForecast()
        """The time of steps, for ``target_itl_ms``; it learns from what is recorded there."""
        self._launched: deque[LaunchedPlan] = deque()
        self._retried = RetryQueue()
        self._prompts = PrefillRows(cache, queue, tiers, self.running, shares, states, clock)
        max_rows = limits.max_num_seqs if limits.splits_drafts else None
        self._row_drafts = RowDrafts(cache, queue, tiers, self.running, max_rows)
        self._n_requests = 0
        self._n_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request that could be admitted is waiting, and none is loading, running or releasing."""
        return not (self.waiting or self.tiers or self.running or self.running.is_releasing)

    @property
    def wants_results(self) -> bool:
        """Whether the results of all launched plans are to be taken before the next ``schedule``: a row with drafts
        is in flight, whose length is not known, or rows of the next plan are to have some. O(running)."""
        if not self._launched:
            return False
        last = self._launched[-1]
        return bool(last.plan.n_drafts) or (
            self.drafts.wants_results(has_prompts=self._has_prompts) and self._n_most_drafts(last) > 0
        )

    @property
    def n_preemptions(self) -> int:
        """Preemptions for lack of pages since the start; those for retries do not count."""
        return self.running.n_preemptions

    @property
    def n_recomputed_tokens(self) -> int:
        """Tokens of preempted requests that steps have computed again since the start. O(1)."""
        return self._prompts.n_recomputed

    @property
    def launched_plans(self) -> tuple[LaunchedPlan, ...]:
        """The plans whose results are not known yet, oldest first. O(launched plans)."""
        return tuple(self._launched)

    def add(self, leader: Request, followers: Sequence[Request] = ()) -> None:
        """Queues a new request: the leading choice, and the choices that fork from it. O(log waiting + tokens).

        Raises:
            QueueFull: ``max_queued_requests`` requests of its sender wait for their first step. Followers and
                preempted requests do not count.
        """
        if (n_waiting := self.waiting.n_unstarted_beside(leader)) >= self.limits.max_queued_requests:
            raise QueueFull(f"the queue is full: {n_waiting} requests wait for their first step; try later")
        leader.set_followers(followers)
        for choice in (leader, *followers):
            choice.order = choice.priority, self._n_requests
            self._n_requests += 1
        self.waiting.add(leader)
        self.states.arrived(leader)

    def abort(self, request: Request) -> None:
        """Finishes an unfinished request; its pages are freed once no launched step uses them.

        If it has followers, the first of them becomes the leader. With a continuation all choices of a request must
        be aborted together. O(running).
        """
        if request.phase is Phase.FOLLOWING:
            assert request.leader is not None
            request.leader.followers.remove(request)
            request.leader = None
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is Phase.LOADING:
            self.tiers.leave(request)
        elif request.phase is not Phase.PAUSED:
            self.running.finish(request)
            self.running.release()
        request.phase = Phase.FINISHED
        self.states.left(request)
        if request.followers:
            leader = request.promote_follower()
            self.waiting.add(leader)
            self.states.arrived(leader)

    def expire(self) -> list[Update]:
        """Fails the requests that have waited longer than ``queue_timeout_s`` for their first step.

        A request that has run never times out, nor one whose pages are being copied to the device. O(loads).
        """
        timeout_s = self.limits.queue_timeout_s
        if timeout_s is None:
            return []
        updates: list[Update] = []
        now = self._clock()
        last = now - timeout_s
        for request in (*self.waiting.take_received_before(last), *self.tiers.take_received_before(last)):
            request.phase = Phase.FINISHED
            self.states.left(request)
            updates.append(Update(request, error=queue_timeout(now - request.received_at, timeout_s)))
        return updates

    def schedule(self) -> StepPlan | None:
        """Makes the next plan; None if nothing can run before a launched step is done.

        While requests are retried after a failed step, every second plan is of one of them alone, and no two plans
        are in flight at once: if its step fails, the request is the cause.

        Takes the finished copies between tiers, and starts new ones.

        O(running + admissions), with retried requests O(retried · running), and ``Queue.candidates`` where a
        request may be admitted.
        """
        if self.tiers.advance():
            self._prompts.unblock()
        plan = self._plan()
        while plan is None and not self._is_delayed and self.running.make_way():
            plan = self._plan()
        self.running.make_way_for_stuck()
        return plan

    def _next_prompts(self) -> Iterator[WaitingPrompt]:
        """Yields namespace and tokens of the requests that will look up their prefixes soon, in that order."""
        waiting = ((request.namespace, request.key) for request in self.waiting.next_requests())
        return chain(self.tiers.next_prompts(), waiting)

    def _expected_prompts(self) -> Iterator[WaitingPrompt]:
        """Yields namespace and tokens of conversations that are expected back, in that order."""
        return ((one.namespace, one.key) for one in self.returns.expected())

    @property
    def _has_prompts(self) -> bool:
        """Whether the next plan is expected to compute prompts. O(running)."""
        return self._prompts.admits or not all(request.is_decoding for request in self.running)

    @property
    def _is_delayed(self) -> bool:
        """Whether there may be more to schedule once a launched step is done, or a copy in flight."""
        return bool(self._launched) or self.tiers.delays_requests

    def _plan(self) -> StepPlan | None:
        """Makes the next plan; None if no request fits into one now."""
        retried = self._retried.ready()
        if not retried:
            return self._plan_together()
        if self._launched:
            return None
        if self._n_steps % 2:
            return self._plan_together() or self._plan_first_alone(retried)
        return self._plan_first_alone(retried) or self._plan_together()

    def complete(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Takes the oldest launched plan's result: marks pages as computed, appends tokens, finishes requests.
        O(rows + new pages), and O(running) for each row that is not finite and each leader with followers."""
        launched = self._launched.popleft()
        assert launched.plan is plan, "results come in the order of the plans"
        assert len(result.tokens) == len(plan.rows) + plan.n_drafts, "a token comes for each sampled position"
        self.cache.release_sources(launched.sources)
        updates: list[Update] = []
        firsts, n_accepted = verify(plan, launched.requests, result, self.drafts)
        rows = list(zip(plan.rows, launched.requests, firsts, n_accepted, result.finite, strict=True))
        computed: list[ComputedRow] = []
        are_right: list[bool] = []
        continued: dict[Continuation, None] = {}
        for row, request, _, n_more, finite in rows:
            self._row_done(request, row)
            is_right = finite and not request.recovery.discards_results
            are_right.append(is_right)
            if is_right:
                blocks, end = request.blocks, row.start + row.n_tokens - row.n_drafts + n_more
                if n_more:
                    request.n_scheduled += n_more
                    self.waiting.charge([request], n_more)
                fills_page = end >= (blocks.n_leased + 1) * self.cache.page_size and blocks.can_commit
                if request.phase is Phase.FINISHED:
                    # It commits no more pages, but others may read those that it has committed.
                    self.cache.mark_computed(blocks, end, plan.step)
                # A row that fills no page has nothing to commit, nor to mark if the leased pages are computed.
                elif fills_page or not blocks.is_computed:
                    key = request.known_key
                    if n_more:
                        assert row.tokens is not None
                        key = key + row.tokens[TOKEN_BYTES : (1 + n_more) * TOKEN_BYTES]
                    computed.append(ComputedRow(blocks, key, end, request.last_step))
        if result.page_scores:
            _give_scores(plan, launched.requests, result.page_scores)
        self.cache.commit_computed(computed, plan.step)
        self.tiers.computed(plan, launched.requests)
        self.states.step_done(plan, are_right)
        if not all(result.finite):
            for _, request, _, _, finite in rows:
                if not finite:
                    updates += recompute_without_tree(self.cache, self.running, request)
        for index, (row, request, first, n_more, finite) in enumerate(rows):
            if finite and request.phase is not Phase.FINISHED and not request.recovery.discards_results:
                # A row of a prompt does not end a retry: it does not show that decoding works.
                if request.recovery.is_retried and index < plan.n_decode and row.sampling is not None:
                    request.recovery.is_retried = False
                row_logprobs = result.prompt_logprobs[index] if result.prompt_logprobs else None
                if row_logprobs and request.prompt_scoring is not None:
                    unreported = request.prompt_scoring.take(request, row.start, row_logprobs)
                    if unreported is not None:
                        updates.append(Update(request, prompt_logprobs=unreported))
                if row.sampling is not None:
                    logprobs = result.logprobs[first : first + 1 + n_more]
                    if request.continuation is None:
                        tokens_of_row = result.tokens[first : first + 1 + n_more]
                        updates.append(self._append_tokens(request, tokens_of_row, logprobs))
                    else:
                        request.continuation.take(request, logprobs[0] if logprobs else None)
                        continued[request.continuation] = None
                elif row.pooling is not None:
                    request.count_prompt()
                    self.running.finish(request)
                    updates.append(Update(request, finish_reason="stop", pooled=result.pooled[index]))
            blocks = request.blocks
            if not request.n_pending_copies:
                if blocks.replaced:
                    self.cache.free_replaced(blocks, plan.step)
                if blocks.window.pages or (blocks.lease is None and self.cache.windows.n_tokens is not None):
                    # This comes after a leader's forks: their first rows start one position before its next row.
                    self.cache.free_behind(blocks, row.start + row.n_tokens - row.n_drafts + n_more)
        self.running.release()
        for continuation in continued:
            updates += continuation.advance()
        n_most = self._n_most_drafts(launched)
        self.drafts.step_done(
            plan,
            launched.requests,
            n_most,
            has_waited=launched.has_waited,
            is_last=not self._launched,
            device_seconds=result.device_seconds,
        )
        return updates

    def fail(self) -> list[Update]:
        """Undoes all launched plans after a failure, newest first. O(running)."""
        involved: list[Request] = []
        while self._launched:
            launched = self._launched.pop()
            self.cache.release_sources(launched.sources)
            for row, request in zip(reversed(launched.plan.rows), reversed(launched.requests), strict=True):
                self._row_done(request, row)
                involved.append(request)
        involved += self.states.undo()
        updates = undo_steps(self.cache, self.running, involved)
        self._retried.add(involved)
        self.running.release()
        return updates

    def check(self) -> None:
        """Checks every invariant of pages and tree; when idle, also that no request holds a page. O(pages).

        Raises:
            InvariantError: a bug in radixkv.
        """
        behind = self.tiers.block_tables()
        self.cache.check([*self.running.block_tables(), *behind])
        self.tiers.check()
        n_held = self.cache.n_pages - self.cache.n_available
        if self.is_idle and n_held and not behind:
            raise InvariantError(f"no request is left, but {n_held} pages are leased, detached or in a tail")

    def _plan_first_alone(self, retried: Sequence[Request]) -> StepPlan | None:
        """Plans a step of the first retried request that fits; None if none does. O(retried · running).

        The search goes on after a request that does not fit: a later one may hold the row or the pages it lacks.
        """
        self._prompts.forget_refused()
        plans = (self._plan_alone(request) for request in retried)
        return next((plan for plan in plans if plan is not None), None)

    def _plan_alone(self, request: Request) -> StepPlan | None:
        """Plans a step of a retried request; None if it does not fit, or still releases its pages."""
        if request.phase not in (Phase.WAITING, Phase.RUNNING):
            return None
        if request.is_decoding and request.phase is Phase.RUNNING:
            return self._make_plan([request], lambda _: [])
        return self._make_plan([], lambda budget: self._prompts.alone(request, budget, self._n_steps))

    def _plan_together(self) -> StepPlan | None:
        """Plans a step of all requests that are not retried alone; None if it would have no rows."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            if not (request.has_all_rows or request.recovery.is_retried):
                (decoding if request.is_decoding else prefilling).append(request)
        return self._make_plan(decoding, lambda budget: self._prompts.together(prefilling, budget, self._n_steps))

    def _make_plan(
        self, decoding: list[Request], prompt_rows: Callable[[int], list[PlannedRow]]
    ) -> StepPlan | None:
        """Makes a plan of decode rows and prompt rows, which counts as launched; None if it would have no rows.

        Args:
            decoding: requests whose next token to compute.
            prompt_rows: makes the rows of prompts, of at most the given number of tokens.
        """
        requests, rows = self._decode_rows(decoding)
        n_decoding = n_decode = len(rows)
        n_drafts = sum([row.n_drafts for row in rows])
        for request, row in prompt_rows(self._prompt_budget(n_decoding, n_drafts)):
            n_decode += row.n_tokens == 1 and n_decode == len(rows)  # the last token of a prompt, alone
            requests.append(request)
            rows.append(row)
        if not rows:
            return None
        shared: tuple[SharedRun, ...] = ()
        runs_id = 0
        if self._shared_prefixes is not None:
            shared, runs_id = self._shared_prefixes.find(requests[:n_decoding])
        # A decoding request has a leader only if a continuation has forked it.
        forks = [request for request in requests[:n_decoding] if request.leader is not None]
        copies, window_copies, sources = _take_copies(forks + requests[n_decoding:])
        is_masked = any(row.sampling is not None and row.sampling.is_masked for row in rows)
        loads, saves, state_forks = self.states.take(self._n_steps)
        plan = StepPlan(
            self._n_steps,
            tuple(rows),
            copies,
            shared,
            runs_id,
            is_masked,
            n_decode,
            n_drafts,
            loads,
            saves,
            window_copies,
            state_forks,
        )
        self.headroom.step()
        self._launched.append(LaunchedPlan(plan, requests, sources, has_waited=not self._launched))
        self._n_steps += 1
        return plan

    def _prompt_budget(self, n_decoding: int, n_drafts: int) -> int:
        """Returns the maximum tokens of prompts beside decode rows and their drafts."""
        budget = self.limits.max_num_batched_tokens - n_decoding - n_drafts
        if self.limits.target_itl_ms is None or not n_decoding:
            return budget
        n_in_time = self.forecast.prompt_tokens(n_decoding + n_drafts, self.limits.target_itl_ms / 1e3)
        return budget if n_in_time is None else min(budget, max(n_in_time, self.cache.page_size))

    def _decode_rows(self, decoding: list[Request]) -> tuple[list[Request], list[Row]]:
        """Makes the rows of the decoding requests' next tokens; returns the requests that have one, and their rows.

        A request without a page for its next token gets no row, nor one whose eviction waits for a result. If any
        lacks a page, none has drafts, which would take what the next ones need.
        """
        page_size = self.cache.page_size
        full = [r.blocks for r in decoding if r.n_scheduled == len(r.blocks.pages) * page_size]
        has_pages = self.cache.append_pages(full)  # one call for all, if no request must be preempted
        requests: list[Request] = []
        rows: list[Row] = []
        drafts: Iterable[bytes] = repeat(b"", len(decoding))
        if has_pages and not self._launched:
            drafts = self._row_drafts.draft(self.drafts, decoding, self.limits.max_num_batched_tokens)
        for request, drafts_of_row in zip(decoding, drafts, strict=True):
            start = request.n_scheduled
            if request.phase is not Phase.RUNNING:
                continue  # it was preempted for the page of another
            if request.kv_eviction is not None and not request.kv_eviction.make_room(request):
                continue
            if has_pages or self.running.grow(request, start + 1):
                requests.append(request)
                rows.append(request.make_row(start, start + 1, start, self._n_steps, drafts_of_row))
        self.waiting.charge(requests, 1)
        self.states.plan_decode(requests)
        return requests, rows

    def _n_most_drafts(self, last: LaunchedPlan) -> int:
        """Returns how many drafts the next plan has room for, if the same requests have its decode rows."""
        decoding = last.requests[: last.plan.n_decode]
        return self._row_drafts.n_most(decoding, self.limits.max_num_batched_tokens)

    def _row_done(self, request: Request, row: Row) -> None:
        """Notes that a launched row is done or has failed, and with it the page copies before it."""
        request.row_done(row)
        if request.leader is not None:
            self.running.copies_done(request)

    def _append_tokens(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> Update:
        """Appends what a row has sampled: forks the followers of a leader, finishes a request at its end.

        A request whose constraint rejects a token fails.
        """
        reason = None
        n_appended, n_most = 0, request.max_tokens - request.n_outputs
        while reason is None and n_appended < len(tokens):
            token = tokens[n_appended]
            if request.constraint is not None and not request.constraint.accept(token):
                request.known_key += pack_tokens(tokens[:n_appended])
                self.running.finish(request)
                return Update(request, error=request.constraint.rejection(token))
            n_appended += 1
            if token in request.stop_token_ids or (request.constraint is not None and request.constraint.has_ended):
                reason = "stop"
            elif n_appended == n_most:
                reason = "length"
        request.known_key += pack_tokens(tokens[:n_appended])
        if request.cache_use.counted is None:
            request.count_prompt()
        request.reads_cache = True
        if request.followers:
            self.running.fork_followers(request)
        if reason is not None:
            self.states.ended(request)
            self.running.finish(request)
        found = [one for one in logprobs[:n_appended] if one is not None]
        return Update(request, tokens[:n_appended], reason, logprobs=found or None)


def _give_scores(plan: StepPlan, requests: Sequence[Request], scores: Sequence[float]) -> None:
    """Gives the scores of pages to those who have asked for them. O(rows + scores)."""
    first = 0
    for row, request in zip(plan.rows, requests, strict=True):
        if row.scored_pages and request.kv_eviction is not None:
            end = first + len(row.scored_pages)
            request.kv_eviction.take_scores(scores[first:end])
            first = end


_Copies = tuple[tuple[int, int], ...]


def _take_copies(requests: list[Request]) -> tuple[_Copies, _Copies, list[Lease]]:
    """Takes the copies of pages and of window pages before the rows of these requests, and the leases on their
    sources."""
    copies: list[tuple[int, int]] = []
    window_copies: list[tuple[int, int]] = []
    sources: list[Lease] = []
    for request in requests:
        blocks = request.blocks
        if blocks.copies:
            copies += blocks.copies
            blocks.copies = []
            if blocks.source is not None:
                sources.append(blocks.source)
                blocks.source = None
        if blocks.window.copies:
            window_copies += blocks.window.copies
            blocks.window.copies = []
    return tuple(copies), tuple(window_copies), sources
