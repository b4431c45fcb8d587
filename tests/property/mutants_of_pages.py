"""Mutants of who owns a page, who shares it, and when it may be written or freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Namespace, Node
from radixkv.tree.radix_tree import EvictedRun, RadixTree

Patch = pytest.MonkeyPatch


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
        return [EvictedRun(node.namespace, 0, bytes(node.key), list(node.pages))]

    patch.setattr(RadixTree, "evict", mutant)


def never_release(patch: Patch) -> None:
    patch.setattr(RadixTree, "release", lambda self, lease: [])


def leak_the_tail(patch: Patch) -> None:
    close = PageCache.close

    def mutant(self: PageCache, blocks: BlockTable) -> None:
        del blocks.pages[blocks.n_leased :]
        close(self, blocks)

    patch.setattr(PageCache, "close", mutant)


def leak_duplicates(patch: Patch) -> None:
    def mutant(self: PageCache, blocks: BlockTable, step: int) -> None:
        blocks.replaced.clear()

    patch.setattr(PageCache, "free_replaced", mutant)


def free_while_in_flight(patch: Patch) -> None:
    close = RunningRequests.close

    def mutant(self: RunningRequests) -> None:
        for request in self.releasing:
            if request.block_table is not None and request.block_table.pages:
                self._cache.close(request.block_table)
                request.block_table = BlockTable(None, [], 0)
            if not request.n_in_flight:
                del self._draining[request]
                close(self, request)

    patch.setattr(RunningRequests, "release", mutant)


def free_duplicates_while_in_flight(patch: Patch) -> None:
    commit = PageCache._commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        n_in_tree = commit(self, blocks, tokens, n_tokens, -1)
        self.free_replaced(blocks, 0)
        return n_in_tree

    patch.setattr(PageCache, "_commit", mutant)


def commit_an_unwritten_token(patch: Patch) -> None:
    commit = PageCache._commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        ahead = min(len(blocks.pages) * self.page_size, n_tokens + 1)
        padded = tokens + bytes(4 * max(0, ahead - len(tokens) // 4))
        return commit(self, blocks, padded, ahead, last_read)

    patch.setattr(PageCache, "_commit", mutant)


def free_duplicates_before_the_table_moves(patch: Patch) -> None:
    commit = PageCache._commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        before = list(blocks.pages)
        n_in_tree = commit(self, blocks, tokens, n_tokens, last_read)
        blocks.pages[:] = before
        return n_in_tree

    patch.setattr(PageCache, "_commit", mutant)


def leave_the_devices_table_stale(patch: Patch) -> None:
    commit = PageCache._commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        n_on_device = blocks.n_on_device
        n_in_tree = commit(self, blocks, tokens, n_tokens, last_read)
        blocks.n_on_device = n_on_device
        return n_in_tree

    patch.setattr(PageCache, "_commit", mutant)


def drop_a_committed_row_from_its_plan(patch: Patch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is None or len(plan.rows) < 2:
            return plan
        launched = self._launched.pop()
        request = launched.requests[-1]
        request.n_in_flight -= 1
        request.n_output_placeholders -= plan.rows[-1].sampling is not None
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

    def mutant(self: RadixTree, lease: Lease, tokens: bytes, pages: list[int]) -> list[int]:
        if not lease.node.detached:
            return commit(self, lease, tokens, pages)
        lease.node = self._forest.append(lease.node, tokens, pages)
        lease.n_tokens += self._page_size * len(pages)
        return []

    patch.setattr(RadixTree, "commit", mutant)


def keep_the_pages_of_a_nan_row(patch: Patch) -> None:
    patch.setattr(PageCache, "detach_uncomputed", lambda self, blocks: None)
    patch.setattr(RadixTree, "detach_uncomputed", lambda self, lease: [])


def write_into_shared_pages(patch: Patch) -> None:
    launch = Request.make_row

    def mutant(self: Request, start: int, end: int, write_start: int, step: int) -> Row:
        return replace(launch(self, start, end, write_start, step), write_start=start)

    patch.setattr(Request, "make_row", mutant)


def accept_what_a_quarantined_row_sampled(patch: Patch) -> None:
    requeue = RunningRequests.requeue
    patch.setattr(
        RunningRequests,
        "requeue",
        lambda self, request, *, discards_results=True: requeue(self, request, discards_results=False),
    )


def count_a_page_twice(patch: Patch) -> None:
    pin = Forest.pin

    def mutant(self: Forest, node: Node) -> None:
        if not node.n_leases and node.parent is not None:
            self.n_evictable += 1
        pin(self, node)

    patch.setattr(Forest, "pin", mutant)


OF_PAGES: tuple[Callable[[Patch], None], ...] = (
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
)
