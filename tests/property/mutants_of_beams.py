"""Mutants of beam groups: which beams go on, with which pages, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from radixkv.runtime.beams.group import BeamGroup
from radixkv.runtime.beams.search import BeamSearch, Successor
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.wire.messages import TokenLogprobs

Patch = pytest.MonkeyPatch


def share_the_partial_page_of_a_beam(patch: Patch) -> None:
    start, fork = RunningRequests.fork, PageCache.fork
    beams: list[bool] = []

    def starting(self: RunningRequests, forks: Sequence[tuple[Request, Request]]) -> None:
        beams[:] = [bool(forks) and forks[0][0].continuation is not None]
        start(self, forks)

    def forking(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        if beams[0]:
            sources = {copy: source for source, copy in second.copies}
            second.pages = [sources.get(page, page) for page in second.pages]
            second.copies = []
            self.close(BlockTable(None, list(sources), 0))
        return second

    patch.setattr(RunningRequests, "fork", starting)
    patch.setattr(PageCache, "fork", forking)


def continue_another_beam(patch: Patch) -> None:
    advance = BeamSearch.advance

    def mutant(self: BeamSearch, candidates: Sequence[TokenLogprobs]) -> list[Successor]:
        chosen = advance(self, candidates)
        last = len(candidates) - 1
        return [Successor(last - parent, token) for parent, token in chosen]

    patch.setattr(BeamSearch, "advance", mutant)


def plan_a_beam_before_its_group_has_chosen(patch: Patch) -> None:
    patch.setattr(Request, "has_all_rows", property(lambda self: self.n_outputs >= self.max_tokens))


def keep_the_pages_of_a_beam_that_ends(patch: Patch) -> None:
    def drop(self: RunningRequests, request: Request) -> None:
        del self._active[request]

    patch.setattr(RunningRequests, "drop", drop)


def never_make_way_for_the_other_beams(patch: Patch) -> None:
    patch.setattr(RunningRequests, "make_way", lambda self: False)


def never_pause_a_beam(patch: Patch) -> None:
    take = BeamGroup.take

    def mutant(self: BeamGroup, request: Request, logprobs: TokenLogprobs | None) -> None:
        take(self, request, logprobs)
        request.is_paused = False

    patch.setattr(BeamGroup, "take", mutant)


OF_BEAMS: tuple[Callable[[Patch], None], ...] = (
    share_the_partial_page_of_a_beam,
    continue_another_beam,
    plan_a_beam_before_its_group_has_chosen,
    keep_the_pages_of_a_beam_that_ends,
    never_make_way_for_the_other_beams,
    never_pause_a_beam,
)
