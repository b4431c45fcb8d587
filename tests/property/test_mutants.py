"""The property test can fail: each mutant breaks one rule of the production code, and must be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from radixkv.errors import InvariantError
from radixkv.runtime.cache import PageCache
from radixkv.runtime.plan import Row, RowSampling, Scoring, SharedRun, StepPlan
from radixkv.runtime.request import Holding, Request
from radixkv.runtime.running import RunningRequests
from radixkv.runtime.scheduler import Scheduler
from radixkv.runtime.shared import SharedRows
from radixkv.runtime.waiting import WaitingQueue
from radixkv.tree import sharing as tree_sharing
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Namespace, Node
from radixkv.tree.radix import Commit, EvictedRun, RadixTree
from radixkv.wire import PromptLogprobs, TokenLogprobs
from support.actions import drive
from support.engine_machine import EngineMachine

Patch = pytest.MonkeyPatch

N_HISTORIES = 600


def ignore_the_namespace(patch: Patch) -> None:
    lease = RadixTree.lease
    patch.setattr(RadixTree, "lease", lambda self, _, tokens: lease(self, Namespace(), tokens))


def lose_a_count_in_a_split(patch: Patch) -> None:
    split = Forest.split

    def mutant(self: Forest, node: Node, n_pages: int) -> Node:
        upper = split(self, node, n_pages)
        upper.n_leases = max(0, upper.n_leases - 1)
        return upper

    patch.setattr(Forest, "split", mutant)


def evict_a_leased_or_inner_node(patch: Patch) -> None:
    def mutant(self: RadixTree, n_pages: int) -> list[EvictedRun]:
        nodes = [node for node in self._forest.reachable() if node.parent is not None]
        if not nodes:
            return []
        node = nodes[0]
        return [EvictedRun(node.namespace, 0, bytes(node.key), node.pages.tolist())]

    patch.setattr(RadixTree, "evict", mutant)


def never_release(patch: Patch) -> None:
    patch.setattr(RadixTree, "release", lambda self, lease: [])


def leak_the_tail(patch: Patch) -> None:
    close = PageCache.close

    def mutant(self: PageCache, holding: Holding) -> None:
        del holding.table[holding.n_leased :]
        close(self, holding)

    patch.setattr(PageCache, "close", mutant)


def leak_duplicates(patch: Patch) -> None:
    def mutant(self: PageCache, holding: Holding, step: int) -> None:
        holding.retired.clear()

    patch.setattr(PageCache, "reap", mutant)


def free_while_in_flight(patch: Patch) -> None:
    close = RunningRequests.close

    def mutant(self: RunningRequests) -> None:
        for request in self.draining:
            if request.holding is not None and request.holding.table:
                self._cache.close(request.holding)
                request.holding = Holding(None, [], 0)
            if not request.n_in_flight:
                del self._draining[request]
                close(self, request)

    patch.setattr(RunningRequests, "drain", mutant)


def free_duplicates_while_in_flight(patch: Patch) -> None:
    commit = PageCache.commit

    def mutant(
        self: PageCache, holding: Holding, tokens: bytearray, n_tokens: int, *, step: int, last_read: int
    ) -> int:
        n_in_tree = commit(self, holding, tokens, n_tokens, step=step, last_read=-1)
        self.reap(holding, 0)
        return n_in_tree

    patch.setattr(PageCache, "commit", mutant)


def commit_an_unwritten_token(patch: Patch) -> None:
    commit = PageCache.commit

    def mutant(
        self: PageCache, holding: Holding, tokens: bytearray, n_tokens: int, *, step: int, last_read: int
    ) -> int:
        ahead = min(len(holding.table) * self.page_size, n_tokens + 1)
        padded = tokens + bytes(4 * max(0, ahead - len(tokens) // 4))
        return commit(self, holding, padded, ahead, step=step, last_read=last_read)

    patch.setattr(PageCache, "commit", mutant)


def free_duplicates_before_the_table_moves(patch: Patch) -> None:
    commit = PageCache.commit

    def mutant(
        self: PageCache, holding: Holding, tokens: bytearray, n_tokens: int, *, step: int, last_read: int
    ) -> int:
        before = list(holding.table)
        n_in_tree = commit(self, holding, tokens, n_tokens, step=step, last_read=last_read)
        holding.table[:] = before
        return n_in_tree

    patch.setattr(PageCache, "commit", mutant)


def leave_the_devices_table_stale(patch: Patch) -> None:
    commit = PageCache.commit

    def mutant(
        self: PageCache, holding: Holding, tokens: bytearray, n_tokens: int, *, step: int, last_read: int
    ) -> int:
        n_sent = holding.n_sent
        n_in_tree = commit(self, holding, tokens, n_tokens, step=step, last_read=last_read)
        holding.n_sent = n_sent
        return n_in_tree

    patch.setattr(PageCache, "commit", mutant)


def drop_a_committed_row_from_its_plan(patch: Patch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is None or len(plan.rows) < 2:
            return plan
        launched = self._launched.pop()
        request = launched.requests[-1]
        request.n_in_flight -= 1
        request.n_sampling -= plan.rows[-1].sampling is not None
        plan = StepPlan(plan.step, plan.rows[:-1])
        self._launched.append(type(launched)(plan, launched.requests[:-1]))
        return plan

    patch.setattr(Scheduler, "schedule", mutant)


def order_readers_before_writers(patch: Patch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is None:
            return None
        launched = self._launched.pop()
        plan = StepPlan(plan.step, plan.rows[::-1])
        self._launched.append(type(launched)(plan, launched.requests[::-1]))
        return plan

    patch.setattr(Scheduler, "schedule", mutant)


def commit_after_detach(patch: Patch) -> None:
    commit = RadixTree.commit

    def mutant(self: RadixTree, lease: Lease, tokens: bytes, pages: list[int], step: int) -> Commit:
        if not lease.node.detached:
            return commit(self, lease, tokens, pages, step)
        lease.node = self._forest.append(lease.node, tokens, pages, step)
        return Commit(len(pages), [])

    patch.setattr(RadixTree, "commit", mutant)


def keep_the_pages_of_a_nan_row(patch: Patch) -> None:
    patch.setattr(PageCache, "detach_unsettled", lambda self, holding: None)
    patch.setattr(RadixTree, "detach_unsettled", lambda self, lease: [])


def write_into_shared_pages(patch: Patch) -> None:
    row = Scheduler._row

    def mutant(self: Scheduler, request: Request, start: int, end: int, write_start: int) -> Row:
        return replace(row(self, request, start, end, write_start), write_start=start)

    patch.setattr(Scheduler, "_row", mutant)


def accept_what_a_quarantined_row_sampled(patch: Patch) -> None:
    requeue = RunningRequests.requeue
    patch.setattr(
        RunningRequests, "requeue", lambda self, request, *, discards=True: requeue(self, request, discards=False)
    )


def count_a_page_twice(patch: Patch) -> None:
    pin = Forest.pin

    def mutant(self: Forest, node: Node) -> None:
        if not node.n_leases and node.parent is not None:
            self.n_evictable += 1
        pin(self, node)

    patch.setattr(Forest, "pin", mutant)


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
        self.end_copy(follower)
        follower.leader, leader.n_borrowers = leader, 0

    patch.setattr(RunningRequests, "_fork", mutant)
    patch.setattr(RunningRequests, "end_copy", lambda self, request: setattr(request, "leader", None))


def share_the_partial_page_of_a_fork(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, holding: Holding, n_tokens: int, n_pages: int) -> Holding:
        second = fork(self, holding, n_tokens, n_pages)
        for place, page in enumerate(second.table):
            source = next((source for source, copy in second.copies if copy == page), None)
            if source is not None:
                second.table[place] = source
                self._free.append(page)
                self._n_held -= 1
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def leave_out_the_copies(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, holding: Holding, n_tokens: int, n_pages: int) -> Holding:
        second = fork(self, holding, n_tokens, n_pages)
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
    seat = RunningRequests._seat

    def mutant(self: RunningRequests, request: Request, holding: Holding) -> None:
        seat(self, request, holding)
        request.needs_history = request.needs_history and not request.n_outputs

    patch.setattr(RunningRequests, "_seat", mutant)


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
        self: PageCache, namespace: Namespace, tokens: bytes, *, reads: bool = True, private: bool = False
    ) -> Holding:
        return opened(self, namespace, tokens, reads=True, private=private)

    chunk = Scheduler._chunk

    def reading(self: Scheduler, request: Request, budget: int) -> Row | None:
        request.reads_cache = True
        return chunk(self, request, budget)

    patch.setattr(PageCache, "open", mutant)
    patch.setattr(Scheduler, "_chunk", reading)


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
    find = SharedRows.find

    def mutant(self: SharedRows, requests: Sequence[Request]) -> tuple[SharedRun, ...]:
        return self._runs if len(requests) == len(self._leases) else find(self, requests)

    patch.setattr(SharedRows, "find", mutant)


def share_pages_of_the_tail(patch: Patch) -> None:
    shared_runs = PageCache.shared_runs

    def mutant(self: PageCache, leases: Sequence[Lease | None]) -> list[tree_sharing.SharedRun]:
        return [run._replace(n_pages=run.n_pages + 1) for run in shared_runs(self, leases)]

    patch.setattr(PageCache, "shared_runs", mutant)


def find_shared_runs_in_another_order_of_the_rows(patch: Patch) -> None:
    find = SharedRows.find
    patch.setattr(SharedRows, "find", lambda self, requests: find(self, requests[::-1]))


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    ignore_the_namespace,
    lose_a_count_in_a_split,
    evict_a_leased_or_inner_node,
    never_release,
    leak_the_tail,
    leak_duplicates,
    free_while_in_flight,
    free_duplicates_while_in_flight,
    commit_an_unwritten_token,
    free_duplicates_before_the_table_moves,
    leave_the_devices_table_stale,
    drop_a_committed_row_from_its_plan,
    order_readers_before_writers,
    commit_after_detach,
    keep_the_pages_of_a_nan_row,
    write_into_shared_pages,
    accept_what_a_quarantined_row_sampled,
    count_a_page_twice,
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


def drive_many(n_histories: int) -> None:
    for seed in range(n_histories):
        drive(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    # Which of the checks finds it first is of no matter, nor that broken state makes Python itself stumble.
    with pytest.raises((AssertionError, InvariantError, ValueError, KeyError, IndexError, AttributeError)):
        drive_many(N_HISTORIES)


@pytest.mark.parametrize("mutant", [ignore_the_namespace, leak_the_tail, free_while_in_flight])
def test_the_state_machine_can_fail(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    once = settings(max_examples=200, stateful_step_count=40, deadline=None, phases=[Phase.generate], database=None)
    try:
        run_state_machine_as_test(EngineMachine, settings=once)
    except Exception:
        return  # one failure or a group of several
    raise AssertionError("no history found the mutant")
