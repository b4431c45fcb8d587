"""Mutants of choices, scores, waiting, of what rows of a step share, and of the wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from mutants_of_pages import replace_plans

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.launched_steps import LaunchedSteps
from radixkv.runtime.request import NO_ADAPTER, PromptScoring, Request, Update
from radixkv.runtime.scheduler import scheduler
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.step.plan import RowSampling, Scoring, SharedRun, StepPlan
from radixkv.tree import shared_runs as tree_sharing
from radixkv.tree.node import TOKEN_BYTES, Lease
from radixkv.tree.radix_tree import RadixTree
from radixkv.wire.messages import PromptLogprobs, TokenLogprobs

Patch = pytest.MonkeyPatch


def forget_the_followers_of_a_leader_that_ends(patch: Patch) -> None:
    abort = Scheduler.abort

    def mutant(self: Scheduler, request: Request) -> None:
        request.followers = []
        abort(self, request)

    patch.setattr(Scheduler, "abort", mutant)


def fork_without_a_pin(patch: Patch) -> None:
    fork = RadixTree.fork

    def mutant(self: RadixTree, lease: Lease) -> Lease:
        second = fork(self, lease)
        node = lease.node
        while node is not None:
            node.n_leases -= 1
            node = node.parent
        return second

    patch.setattr(RadixTree, "fork", mutant)


def copy_a_step_late(patch: Patch) -> None:
    waiting: list[tuple[int, int]] = []

    def change(plan: StepPlan) -> StepPlan:
        if plan.step == 0:
            waiting.clear()  # another history begins
        late = replace(plan, copies=tuple(waiting))
        waiting[:] = plan.copies
        return late

    replace_plans(patch, change)


def free_the_source_of_a_copy_early(patch: Patch) -> None:
    fork_followers = RunningRequests.fork_followers

    def mutant(self: RunningRequests, leader: Request) -> None:
        fork_followers(self, leader)
        leader.n_pending_copies = 0

    patch.setattr(RunningRequests, "fork_followers", mutant)
    patch.setattr(RunningRequests, "copies_done", lambda self, request: setattr(request, "leader", None))


def share_the_partial_page_of_a_fork(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        sources = {copy: source for source, copy in second.copies}
        second.pages = [sources.get(page, page) for page in second.pages]
        second.copies = []
        self.close(BlockTable(None, list(sources), 0))
        return second

    patch.setattr(PageCache, "fork", mutant)


def send_the_history_once_only(patch: Patch) -> None:
    assign = RunningRequests.assign_batch_slot

    def mutant(self: RunningRequests, request: Request, *args: Any, **options: Any) -> bool:
        is_assigned = assign(self, request, *args, **options)
        request.needs_history = request.needs_history and not request.n_outputs
        return is_assigned

    patch.setattr(RunningRequests, "assign_batch_slot", mutant)


def report_a_scored_position_twice(patch: Patch) -> None:
    def mutant(
        self: PromptScoring, request: Request, start: int, scores: tuple[TokenLogprobs, ...]
    ) -> PromptLogprobs | None:
        self.end = start + 1 + len(scores)
        return PromptLogprobs(request.id, start + 1, list(scores))

    patch.setattr(PromptScoring, "take", mutant)


def score_a_chunk_without_the_next_ones_first_token(patch: Patch) -> None:
    of_row = PromptScoring.of_row

    def mutant(self: PromptScoring, request: Request, start: int, end: int) -> Scoring | None:
        right = of_row(self, request, start, end)
        if right is None or len(right.targets) <= 4:
            return right
        return replace(right, targets=right.targets[: (end - start - 1) * 4] or right.targets)

    patch.setattr(PromptScoring, "of_row", mutant)


def read_the_cache_where_the_prompt_is_scored(patch: Patch) -> None:
    add = Scheduler.add

    def mutant(self: Scheduler, leader: Request, followers: Sequence[Request] = ()) -> None:
        leader.reads_cache = True
        add(self, leader, followers)

    patch.setattr(Scheduler, "add", mutant)


def forbid_an_early_end_one_token_too_long(patch: Patch) -> None:
    sampling = Request.next_sampling

    def mutant(self: Request) -> RowSampling:
        self.min_tokens += 1
        try:
            return sampling(self)
        finally:
            self.min_tokens -= 1

    patch.setattr(Request, "next_sampling", mutant)


def admit_a_retried_request_among_others(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "candidates", lambda self: list(self))


def time_out_what_has_run(patch: Patch) -> None:
    def take_received_before(self, time_s):
        taken = [request for request in self if request.received_at < time_s]
        for request in taken:
            self.remove(request)
        return taken

    patch.setattr(WaitingQueue, "take_received_before", take_received_before)


def keep_shared_runs_while_the_rows_are_as_many(patch: Patch) -> None:
    find = SharedPrefixes.find
    last: dict[SharedPrefixes, tuple[int, tuple[tuple[SharedRun, ...], int]]] = {}

    def mutant(self: SharedPrefixes, requests: Sequence[Request]) -> tuple[tuple[SharedRun, ...], int]:
        n_rows, runs = last.get(self, (0, ((), 0)))
        if n_rows != len(requests):
            last.clear()
            runs = find(self, requests)
            last[self] = len(requests), runs
        return runs

    patch.setattr(SharedPrefixes, "find", mutant)


def keep_the_number_of_other_shared_runs(patch: Patch) -> None:
    find = SharedPrefixes.find
    patch.setattr(SharedPrefixes, "find", lambda self, requests: (find(self, requests)[0], 1))


def share_pages_of_the_tail(patch: Patch) -> None:
    shared_runs = RadixTree.shared_runs

    def mutant(self: RadixTree, leases: Sequence[Lease | None]) -> list[tree_sharing.SharedRun]:
        return [run._replace(n_pages=run.n_pages + 1) for run in shared_runs(self, leases)]

    patch.setattr(RadixTree, "shared_runs", mutant)


def find_shared_runs_in_another_order_of_the_rows(patch: Patch) -> None:
    find = SharedPrefixes.find
    patch.setattr(SharedPrefixes, "find", lambda self, requests: find(self, requests[::-1]))


def wait_for_a_device_that_is_done(patch: Patch) -> None:
    seconds_left = LaunchedSteps.seconds_left.fget
    assert seconds_left is not None
    some_s = 0.01

    def mutant(self: LaunchedSteps) -> float:
        return seconds_left(self) or (some_s if len(self) == 1 else 0.0)

    patch.setattr(LaunchedSteps, "seconds_left", property(mutant))


def believe_that_a_failed_step_has_arrived(patch: Patch) -> None:
    undo_steps = scheduler.undo_steps

    def mutant(cache: PageCache, running: RunningRequests, involved: Sequence[Request]) -> list[Update]:
        n_on_device = {request: request.blocks.n_on_device for request in involved}
        updates = undo_steps(cache, running, involved)
        for request, n_entries in n_on_device.items():
            request.blocks.n_on_device = n_entries
        return updates

    patch.setattr(scheduler, "undo_steps", mutant)


def remember_entries_that_were_never_sent(patch: Patch) -> None:
    free = RunningRequests.free

    def mutant(self: RunningRequests, request: Request) -> None:
        request.blocks.n_on_device = len(request.blocks.pages)
        free(self, request)

    patch.setattr(RunningRequests, "free", mutant)


def send_marks_to_the_device(patch: Patch) -> None:
    def mutant(self: Request, start: int, end: int) -> bytes:
        return bytes(self.known_key[start * TOKEN_BYTES : end * TOKEN_BYTES])

    patch.setattr(Request, "tokens", mutant)


def activate_an_adapter_with_the_next_row(patch: Patch) -> None:
    replace_plans(
        patch,
        lambda plan: replace(
            plan,
            rows=tuple(replace(row, adapter="") if row.start < row.adapter_start else row for row in plan.rows),
        ),
    )


def forget_the_adapter_of_a_follower(patch: Patch) -> None:
    set_followers = Request.set_followers

    def mutant(self: Request, followers: Sequence[Request]) -> None:
        for follower in followers:
            follower.adapter = NO_ADAPTER
        set_followers(self, followers)

    patch.setattr(Request, "set_followers", mutant)


OF_REQUESTS: tuple[Callable[[Patch], None], ...] = (
    forget_the_followers_of_a_leader_that_ends,
    fork_without_a_pin,
    copy_a_step_late,
    free_the_source_of_a_copy_early,
    share_the_partial_page_of_a_fork,
    send_the_history_once_only,
    report_a_scored_position_twice,
    score_a_chunk_without_the_next_ones_first_token,
    read_the_cache_where_the_prompt_is_scored,
    forbid_an_early_end_one_token_too_long,
    admit_a_retried_request_among_others,
    time_out_what_has_run,
    keep_shared_runs_while_the_rows_are_as_many,
    keep_the_number_of_other_shared_runs,
    share_pages_of_the_tail,
    find_shared_runs_in_another_order_of_the_rows,
    believe_that_a_failed_step_has_arrived,
    remember_entries_that_were_never_sent,
    send_marks_to_the_device,
    activate_an_adapter_with_the_next_row,
    forget_the_adapter_of_a_follower,
)

OF_ARRIVALS: tuple[Callable[[Patch], None], ...] = (wait_for_a_device_that_is_done,)
