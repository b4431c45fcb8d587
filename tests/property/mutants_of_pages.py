"""Mutants of who owns a page, who shares it, and when it may be written or freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from msgspec.structs import replace

from radixkv.runtime.cache.block_table import BlockTable, ComputedRow
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request, Update
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Node
from radixkv.tree.radix_tree import RadixTree

Patch = pytest.MonkeyPatch
Commit = Callable[[PageCache, BlockTable, bytearray, int, int], int]


def replace_commit(patch: Patch, wrap: Callable[[Commit], Commit]) -> None:
    """Wraps ``PageCache.commit``, and has ``commit_computed`` call it."""
    mutant = wrap(PageCache.commit)

    def computed(self: PageCache, rows: Iterable[ComputedRow], step: int) -> None:
        for blocks, tokens, n_tokens, last_step in rows:
            mutant(self, blocks, tokens, n_tokens, last_step)
            self.mark_computed(blocks, n_tokens, step)

    patch.setattr(PageCache, "commit", mutant)
    patch.setattr(PageCache, "commit_computed", computed)


def replace_plans(
    patch: Patch,
    change: Callable[[StepPlan], StepPlan],
    restore: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result,
) -> None:
    """Gives the device another plan than the scheduler made.

    Args:
        change: makes the device's plan of the scheduler's.
        restore: makes the result that the scheduler expects, from its plan and the device's result.
    """
    schedule, complete = Scheduler.schedule, Scheduler.complete
    own: dict[int, StepPlan] = {}

    def scheduling(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is None:
            return None
        own[plan.step] = plan
        return change(plan)

    def completing(self: Scheduler, plan: StepPlan, result: StepResult) -> list[Update]:
        return complete(self, own[plan.step], restore(own[plan.step], result))

    patch.setattr(Scheduler, "schedule", scheduling)
    patch.setattr(Scheduler, "complete", completing)


def reorder(result: StepResult, order: Sequence[int]) -> StepResult:
    """Takes row ``order[i]`` of the result, which has no drafts, as row i."""
    return StepResult(
        tokens=tuple(result.tokens[i] for i in order),
        finite=tuple(result.finite[i] for i in order),
        logprobs=tuple(result.logprobs[i] for i in order),
        prompt_logprobs=tuple(result.prompt_logprobs[i] for i in order),
        device_seconds=result.device_seconds,
    )


def lose_a_count_in_a_split(patch: Patch) -> None:
    split = Forest.split

    def mutant(self: Forest, node: Node, n_pages: int) -> Node:
        upper = split(self, node, n_pages)
        upper.n_leases = max(0, upper.n_leases - 1)
        return upper

    patch.setattr(Forest, "split", mutant)


def never_release(patch: Patch) -> None:
    patch.setattr(RadixTree, "release", lambda self, lease: [])


def leak_duplicates(patch: Patch) -> None:
    def mutant(self: PageCache, blocks: BlockTable, step: int) -> None:
        blocks.replaced.clear()

    patch.setattr(PageCache, "free_replaced", mutant)


def free_duplicates_while_in_flight(patch: Patch) -> None:
    def wrap(commit: Commit) -> Commit:
        def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
            n_in_tree = commit(self, blocks, tokens, n_tokens, -1)
            self.free_replaced(blocks, 0)
            return n_in_tree

        return mutant

    replace_commit(patch, wrap)


def free_duplicates_before_the_table_moves(patch: Patch) -> None:
    def wrap(commit: Commit) -> Commit:
        def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
            before = list(blocks.pages)
            n_in_tree = commit(self, blocks, tokens, n_tokens, last_step)
            blocks.pages[:] = before
            return n_in_tree

        return mutant

    replace_commit(patch, wrap)


def leave_the_devices_table_stale(patch: Patch) -> None:
    def wrap(commit: Commit) -> Commit:
        def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
            n_on_device = blocks.n_on_device
            n_in_tree = commit(self, blocks, tokens, n_tokens, last_step)
            blocks.n_on_device = n_on_device
            return n_in_tree

        return mutant

    replace_commit(patch, wrap)


def drop_a_committed_row_from_its_plan(patch: Patch) -> None:
    def is_dropped(plan: StepPlan) -> bool:
        return len(plan.rows) > 1 and plan.rows[-1].sampling is None

    def change(plan: StepPlan) -> StepPlan:
        return replace(plan, rows=plan.rows[:-1]) if is_dropped(plan) else plan

    def restore(plan: StepPlan, result: StepResult) -> StepResult:
        if not is_dropped(plan):
            return result
        return StepResult(
            tokens=(*result.tokens, -1),
            finite=(*result.finite, True),
            logprobs=(*result.logprobs, None),
            prompt_logprobs=(*result.prompt_logprobs, None),
            device_seconds=result.device_seconds,
        )

    replace_plans(patch, change, restore)


def order_readers_before_writers(patch: Patch) -> None:
    def order(plan: StepPlan) -> list[int]:
        """The rows of prompts backwards; those that continue an answer, or share a run, must come first."""
        decoding = [index for index, row in enumerate(plan.rows) if row.tokens is None]
        n_first = max((index + 1 for run in plan.shared_runs for index in run.rows), default=0)
        n_first = max(n_first, decoding[-1] + 1 if decoding else 0)
        indices = list(range(len(plan.rows)))
        if plan.n_drafts:  # the result has more tokens than rows
            return indices
        return indices[:n_first] + indices[n_first:][::-1]

    def change(plan: StepPlan) -> StepPlan:
        return replace(plan, rows=tuple(plan.rows[index] for index in order(plan)))

    # The order is its own inverse.
    replace_plans(patch, change, lambda plan, result: reorder(result, order(plan)))


def commit_after_detach(patch: Patch) -> None:
    commit = RadixTree.commit

    def mutant(self: RadixTree, lease: Lease, tokens: bytes, pages: list[int]) -> list[int]:
        end = lease.node
        was_detached, end.detached = end.detached, False
        canonical = commit(self, lease, tokens, pages)
        end.detached = was_detached
        return canonical

    patch.setattr(RadixTree, "commit", mutant)


def keep_the_pages_of_a_nan_row(patch: Patch) -> None:
    patch.setattr(PageCache, "detach_uncomputed", lambda self, blocks: None)
    patch.setattr(RadixTree, "detach_uncomputed", lambda self, lease: [])


def write_into_shared_pages(patch: Patch) -> None:
    make_row = Request.make_row

    def mutant(self: Request, start: int, end: int, write_start: int, step: int, drafts: bytes = b"") -> Row:
        return replace(make_row(self, start, end, write_start, step, drafts), write_start=start)

    patch.setattr(Request, "make_row", mutant)


def accept_what_a_preempted_row_sampled(patch: Patch) -> None:
    preempt = RunningRequests.preempt
    patch.setattr(
        RunningRequests,
        "preempt",
        lambda self, request, *, discards_results=True: preempt(self, request, discards_results=False),
    )


def count_a_page_twice(patch: Patch) -> None:
    add_lease = Forest.add_lease

    def mutant(self: Forest, node: Node) -> None:
        if not node.n_leases and node.parent is not None:
            self.n_evictable += 1
        add_lease(self, node)

    patch.setattr(Forest, "add_lease", mutant)


OF_PAGES: tuple[Callable[[Patch], None], ...] = (
    lose_a_count_in_a_split,
    never_release,
    leak_duplicates,
    free_duplicates_while_in_flight,
    free_duplicates_before_the_table_moves,
    leave_the_devices_table_stale,
    drop_a_committed_row_from_its_plan,
    order_readers_before_writers,
    commit_after_detach,
    keep_the_pages_of_a_nan_row,
    write_into_shared_pages,
    accept_what_a_preempted_row_sampled,
    count_a_page_twice,
)
