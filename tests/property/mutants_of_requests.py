"""Mutants of choices, scores, waiting, and of what rows of a step share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.step.plan import Row, RowSampling, Scoring, SharedRun, StepPlan
from radixkv.tree import shared_runs as tree_sharing
from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree
from radixkv.wire import PromptLogprobs, TokenLogprobs

Patch = pytest.MonkeyPatch


def fork_without_a_pin(patch: Patch) -> None:
    def mutant(self: RadixTree, lease: Lease) -> Lease:
        second = Lease(lease.node, lease.n_tokens)
        self._leases.add(second)
        return second

    patch.setattr(RadixTree, "fork", mutant)


def copy_a_step_late(patch: Patch) -> None:
    schedule = Scheduler.schedule
    kept: list[tuple[int, int]] = []

    def mutant(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is None:
            return None
        launched = self._launched.pop()
        late = replace(plan, copies=tuple(kept))
        kept[:] = plan.copies
        self._launched.append(type(launched)(late, launched.requests))
        return late

    patch.setattr(Scheduler, "schedule", mutant)


def free_the_source_of_a_copy_early(patch: Patch) -> None:
    fork = RunningRequests._fork

    def mutant(self: RunningRequests, leader: Request, follower: Request) -> None:
        fork(self, leader, follower)
        self.end_copies(follower)
        follower.leader, leader.n_pending_copies = leader, 0

    patch.setattr(RunningRequests, "_fork", mutant)
    patch.setattr(RunningRequests, "end_copies", lambda self, request: setattr(request, "leader", None))


def share_the_partial_page_of_a_fork(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        for place, page in enumerate(second.pages):
            source = next((source for source, copy in second.copies if copy == page), None)
            if source is not None:
                second.pages[place] = source
                self._free.append(page)
                self._n_held -= 1
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def leave_out_the_copies(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def forget_the_followers_of_a_leader_that_ends(patch: Patch) -> None:
    abort = Scheduler.abort

    def mutant(self: Scheduler, request: Request) -> None:
        request.followers = []
        abort(self, request)

    patch.setattr(Scheduler, "abort", mutant)


def send_the_history_once_only(patch: Patch) -> None:
    seat = RunningRequests._assign

    def mutant(self: RunningRequests, request: Request, blocks: BlockTable) -> None:
        seat(self, request, blocks)
        request.needs_history = request.needs_history and not request.n_outputs

    patch.setattr(RunningRequests, "_assign", mutant)


def report_a_scored_position_twice(patch: Patch) -> None:
    def mutant(self: Request, start: int, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
        self.n_scored = start + 1 + len(scores)
        return PromptLogprobs(self.id, start + 1, list(scores))

    patch.setattr(Request, "take_scores", mutant)


def score_a_chunk_without_the_next_ones_first_token(patch: Patch) -> None:
    scoring = Request.scoring

    def mutant(self: Request, start: int, end: int) -> Scoring | None:
        asked = scoring(self, start, end)
        if asked is None or len(asked.targets) <= 4:
            return asked
        return replace(asked, targets=asked.targets[: (end - start - 1) * 4] or asked.targets)

    patch.setattr(Request, "scoring", mutant)


def read_the_cache_where_the_prompt_is_scored(patch: Patch) -> None:
    opened = PageCache.open

    def mutant(
        self: PageCache, namespace: Namespace, tokens: bytes, reads: bool = True, bypasses_tree: bool = False
    ) -> BlockTable:
        return opened(self, namespace, tokens, reads=True, bypasses_tree=bypasses_tree)

    chunk = Scheduler._prefill_row

    def reading(self: Scheduler, request: Request, budget: int) -> Row | None:
        request.reads_cache = True
        return chunk(self, request, budget)

    patch.setattr(PageCache, "open", mutant)
    patch.setattr(Scheduler, "_prefill_row", reading)


def forbid_an_early_end_one_token_too_long(patch: Patch) -> None:
    sampling = Request.next_sampling

    def mutant(self: Request) -> RowSampling:
        self.min_tokens += 1
        try:
            return sampling(self)
        finally:
            self.min_tokens -= 1

    patch.setattr(Request, "next_sampling", mutant)


def time_out_what_has_run(patch: Patch) -> None:
    add = WaitingQueue.add

    def mutant(self: WaitingQueue, request: Request) -> None:
        add(self, request)
        self._unstarted[request.serial] = request

    patch.setattr(WaitingQueue, "add", mutant)


def keep_shared_runs_while_the_rows_are_as_many(patch: Patch) -> None:
    find = SharedPrefixes.find

    def mutant(self: SharedPrefixes, requests: Sequence[Request]) -> tuple[SharedRun, ...]:
        return self._runs if len(requests) == len(self._leases) else find(self, requests)

    patch.setattr(SharedPrefixes, "find", mutant)


def share_pages_of_the_tail(patch: Patch) -> None:
    shared_runs = PageCache.shared_runs

    def mutant(self: PageCache, leases: Sequence[Lease | None]) -> list[tree_sharing.SharedRun]:
        return [run._replace(n_pages=run.n_pages + 1) for run in shared_runs(self, leases)]

    patch.setattr(PageCache, "shared_runs", mutant)


def find_shared_runs_in_another_order_of_the_rows(patch: Patch) -> None:
    find = SharedPrefixes.find
    patch.setattr(SharedPrefixes, "find", lambda self, requests: find(self, requests[::-1]))


OF_REQUESTS: tuple[Callable[[Patch], None], ...] = (
    fork_without_a_pin,
    copy_a_step_late,
    free_the_source_of_a_copy_early,
    share_the_partial_page_of_a_fork,
    leave_out_the_copies,
    forget_the_followers_of_a_leader_that_ends,
    send_the_history_once_only,
    report_a_scored_position_twice,
    score_a_chunk_without_the_next_ones_first_token,
    read_the_cache_where_the_prompt_is_scored,
    forbid_an_early_end_one_token_too_long,
    time_out_what_has_run,
    keep_shared_runs_while_the_rows_are_as_many,
    share_pages_of_the_tail,
    find_shared_runs_in_another_order_of_the_rows,
)
