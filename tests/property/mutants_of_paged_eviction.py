"""Mutants of the pages that answers with a budget go on without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from radixkv.runtime.cache.block_table import BlockTable, ReplacedPage
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.paged_eviction.eviction import PagedEviction
from radixkv.runtime.request import Request

Patch = pytest.MonkeyPatch


def commit_after_a_drop(patch: Patch) -> None:
    patch.setattr(BlockTable, "can_commit", BlockTable.is_in_tree)
    commit = PageCache.commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
        skipped, blocks.skipped = blocks.skipped, []
        try:
            return commit(self, blocks, tokens, n_tokens, last_step)
        finally:
            blocks.skipped = skipped

    patch.setattr(PageCache, "commit", mutant)


def free_dropped_pages_while_in_flight(patch: Patch) -> None:
    skip = PageCache.skip
    patch.setattr(PageCache, "skip", lambda self, blocks, entries, _: skip(self, blocks, entries, -1))


def free_dropped_pages_of_the_tree(patch: Patch) -> None:
    def skip(self: PageCache, blocks: BlockTable, entries: Sequence[int], last_step: int) -> int:
        blocks.replaced += [ReplacedPage(last_step, entry, blocks.pages[entry]) for entry in entries]
        blocks.skip(entries)
        return len(entries)

    patch.setattr(PageCache, "skip", skip)


def keep_dropped_pages(patch: Patch) -> None:
    def skip(self: PageCache, blocks: BlockTable, entries: Sequence[int], last_step: int) -> int:
        blocks.skip(entries)
        return 0

    patch.setattr(PageCache, "skip", skip)


def leave_dropped_pages_in_the_devices_table(patch: Patch) -> None:
    skip = BlockTable.skip

    def mutant(self: BlockTable, entries: Sequence[int]) -> None:
        n_on_device = self.n_on_device
        skip(self, entries)
        self.n_on_device = min(n_on_device, self.n_read)

    patch.setattr(BlockTable, "skip", mutant)


def write_at_the_place_before_the_drop(patch: Patch) -> None:
    make_row = Request.make_row

    def mutant(self: Request, *args: int, **kwargs: bytes) -> object:
        row = make_row(self, *args, **kwargs)  # type: ignore[arg-type]
        return type(row)(**{**{name: getattr(row, name) for name in row.__struct_fields__}, "n_skipped": 0})

    patch.setattr(Request, "make_row", mutant)


def keep_the_scores_of_a_preempted_request(patch: Patch) -> None:
    begin = PagedEviction._start

    def mutant(self: PagedEviction, blocks: BlockTable | None) -> None:
        if blocks is None:
            begin(self, blocks)
        self._blocks = blocks

    patch.setattr(PagedEviction, "_start", mutant)


def share_the_run_of_a_table_that_skips_pages(patch: Patch) -> None:
    from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes

    find = SharedPrefixes.find

    def mutant(self: SharedPrefixes, requests: Sequence[Request]) -> object:
        skipped = [request.blocks.skipped for request in requests]
        for request in requests:
            request.blocks.skipped = []
        found = find(self, requests)
        for request, entries in zip(requests, skipped, strict=True):
            request.blocks.skipped = entries
        return found

    patch.setattr(SharedPrefixes, "find", mutant)


def look_up_what_others_have_left_behind_the_first_drop(patch: Patch) -> None:
    patch.setattr(Request, "lookup_key", property(lambda self: self.known_key))


OF_PAGED_EVICTION: tuple[Callable[[Patch], None], ...] = (
    commit_after_a_drop,
    free_dropped_pages_while_in_flight,
    free_dropped_pages_of_the_tree,
    keep_dropped_pages,
    leave_dropped_pages_in_the_devices_table,
    write_at_the_place_before_the_drop,
    keep_the_scores_of_a_preempted_request,
    share_the_run_of_a_table_that_skips_pages,
    look_up_what_others_have_left_behind_the_first_drop,
)
