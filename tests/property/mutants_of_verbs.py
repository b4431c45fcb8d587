"""Mutants of public verbs of the tree, the cache and the scheduler: those that every change is tested with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.evict import EvictedRun
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree

Patch = pytest.MonkeyPatch


def ignore_the_namespace(patch: Patch) -> None:
    open_lease = RadixTree.open_lease
    patch.setattr(RadixTree, "open_lease", lambda self, _, **how: open_lease(self, Namespace(), **how))


def evict_a_leased_or_inner_node(patch: Patch) -> None:
    def mutant(self: RadixTree, n_pages: int, quotas: object = None, **settings: object) -> list[EvictedRun]:
        pages = list(self.reachable_pages())[:n_pages]
        return [EvictedRun(Namespace(), (), b"", pages)]

    patch.setattr(RadixTree, "evict", mutant)


def commit_an_unwritten_token(patch: Patch) -> None:
    commit = PageCache.commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
        ahead = min(len(blocks.pages) * self.page_size, n_tokens + 1)
        padded = tokens + bytes(4 * max(0, ahead - len(tokens) // 4))
        return commit(self, blocks, padded, ahead, last_step)

    patch.setattr(PageCache, "commit", mutant)


def leak_the_tail(patch: Patch) -> None:
    close = PageCache.close

    def mutant(self: PageCache, blocks: BlockTable) -> None:
        del blocks.pages[blocks.n_leased :]
        close(self, blocks)

    patch.setattr(PageCache, "close", mutant)


def leave_out_the_copies(patch: Patch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def free_while_in_flight(patch: Patch) -> None:
    abort, complete = Scheduler.abort, Scheduler.complete

    def free(scheduler: Scheduler) -> None:
        for request in scheduler.running.releasing:
            if request.n_in_flight and request.blocks.pages:
                scheduler.cache.close(request.blocks)
                request.block_table = BlockTable(None, [], 0)

    def aborting(self: Scheduler, request: Request) -> None:
        abort(self, request)
        free(self)

    def completing(self: Scheduler, plan: StepPlan, result: StepResult) -> list[Update]:
        updates = complete(self, plan, result)
        free(self)
        return updates

    patch.setattr(Scheduler, "abort", aborting)
    patch.setattr(Scheduler, "complete", completing)


OF_VERBS: tuple[Callable[[Patch], None], ...] = (
    ignore_the_namespace,
    evict_a_leased_or_inner_node,
    commit_an_unwritten_token,
    leak_the_tail,
    leave_out_the_copies,
    free_while_in_flight,
)
