"""Mutants of window pages, where layers with and without windows have pages of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import Slabs
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.cache.window_table import WindowTable
from radixkv.runtime.tiers.copied_states import CopiedTails, HeldState, ReservedState
from radixkv.runtime.tiers.tier_link import TierLink
from radixkv.tree.node import State

Patch = pytest.MonkeyPatch


def free_a_window_page_with_a_position_of_the_window(patch: Patch) -> None:
    free_behind = WindowPages.free_behind
    patch.setattr(
        WindowPages,
        "free_behind",
        lambda self, table, n_tokens: free_behind(self, table, n_tokens + self._page_size),
    )


def keep_the_window_pages_behind_the_window(patch: Patch) -> None:
    """The tables then have more pages than admission and the slabs for windows only allow for."""
    patch.setattr(WindowPages, "free_behind", lambda self, table, n_tokens: False)
    patch.setattr(WindowPages, "is_behind", lambda self, table, n_tokens: False)


def keep_a_tail_of_one_page_too_few(patch: Patch) -> None:
    keep = WindowPages.keep

    def mutant(self: WindowPages, table: WindowTable, state: State) -> None:
        keep(self, table, state)
        if len(state.pages) > 1:
            self._in_tails[state.pages[0]] -= 1
            self._in_tails += type(self._in_tails)()
            state.pages = state.pages[1:]

    patch.setattr(WindowPages, "keep", mutant)
    patch.setattr(WindowPages, "check", lambda self, tables: None)


def keep_the_tail_of_another_position(patch: Patch) -> None:
    first_read = WindowPages.first_read

    def mutant(self: WindowPages, table: WindowTable, state: State) -> None:
        first, last = first_read(self, state.n_tokens), state.n_tokens // self._page_size
        shift = 1 if table.end > last else 0
        state.pages = tuple(table.pages[first + shift - table.first : last + shift - table.first])
        self._in_tails.update(state.pages)

    patch.setattr(WindowPages, "keep", mutant)


def free_the_pages_of_a_tail_with_its_request(patch: Patch) -> None:
    let_go = WindowPages._let_go

    def mutant(self: WindowPages, pages: Iterable[int]) -> None:
        kept = [page for page in pages if page in self._in_tails and self._in_tables[page] == 1]
        let_go(self, pages)
        for page in kept:
            self._count_idle(page, -1)
            self.slabs.give_window_back(page)

    patch.setattr(WindowPages, "_let_go", mutant)
    patch.setattr(WindowPages, "check", lambda self, tables: None)


def free_the_pages_that_requests_hold_with_a_tail(patch: Patch) -> None:
    def mutant(self: WindowPages, state: State) -> None:
        for page in state.pages:
            self._in_tails[page] -= 1
            if not self._in_tails[page]:
                del self._in_tails[page]
                if page not in self._in_tables:
                    self._count_idle(page, -1)
                self.slabs.give_window_back(page)
        state.pages = ()

    patch.setattr(WindowPages, "_lose", mutant)
    patch.setattr(WindowPages, "check", lambda self, tables: None)


def share_part_of_a_window_page_with_a_fork(patch: Patch) -> None:
    def mutant(self: WindowPages, table: WindowTable, n_tokens: int) -> WindowTable:
        first = max(self.first_read(n_tokens), table.first)
        last = -(-n_tokens // self._page_size)
        second = WindowTable(first, table.pages[first - table.first : last - table.first])
        self._hold(second.pages)
        return second

    patch.setattr(WindowPages, "fork", mutant)


def lose_the_copies_of_forks(patch: Patch) -> None:
    fork = WindowPages.fork

    def mutant(self: WindowPages, table: WindowTable, n_tokens: int) -> WindowTable:
        second = fork(self, table, n_tokens)
        second.copies = []
        return second

    patch.setattr(WindowPages, "fork", mutant)


def send_one_window_page_too_few(patch: Patch) -> None:
    def mutant(self: WindowTable) -> tuple[int, tuple[int, ...]]:
        first = max(self.first, self.n_on_device)
        self.n_on_device = self.end
        return first + 1, tuple(self.pages[first + 1 - self.first :])

    patch.setattr(WindowTable, "take_news", mutant)


def take_a_divided_slab_for_a_window(patch: Patch) -> None:
    def mutant(self: Slabs) -> int:
        if self._for_windows:
            return self._for_windows.pop()
        self._n_free -= self.pages_per_slab
        self.n_shared += 1
        return next(iter(self._divided)) if self._divided else self._whole.pop()

    patch.setattr(Slabs, "take_window", mutant)


def count_the_pages_in_the_place_of_tails_as_taken(patch: Patch) -> None:
    patch.setattr(WindowPages, "n_pages_evictable", property(lambda self: 0))


def free_the_window_pages_of_a_store_in_flight(patch: Patch) -> None:
    patch.setattr(CopiedTails, "hold", lambda self, state: HeldState(state, _parts(self, state)))
    patch.setattr(CopiedTails, "let_go", lambda self, held: None)


def copy_one_window_page_too_few(patch: Patch) -> None:
    pairs = ReservedState.pairs
    patch.setattr(ReservedState, "pairs", lambda self, source: pairs(self, source)[1:] or pairs(self, source))


def share_the_window_pages_of_other_entries(patch: Patch) -> None:
    reserve_tail = WindowPages.reserve_tail

    def mutant(self: WindowPages, cache: PageCache, n_tokens: int, known: Mapping[int, int], **more: Any) -> Any:
        return reserve_tail(self, cache, n_tokens, {entry + 1: page for entry, page in known.items()}, **more)

    patch.setattr(WindowPages, "reserve_tail", mutant)


def attach_the_tail_of_a_failed_copy(patch: Patch) -> None:
    end_load = TierLink._end_load
    patch.setattr(
        TierLink,
        "_end_load",
        lambda self, load, finished: end_load(self, load, finished._replace(n_pages=load.n_pages)),
    )


def _parts(tails: CopiedTails, state: State) -> dict[int, int]:
    last = state.n_tokens // tails._cache.page_size
    return dict(enumerate(state.pages, last - len(state.pages)))


OF_WINDOW_PAGES: tuple[Callable[[Patch], None], ...] = (
    free_a_window_page_with_a_position_of_the_window,
    keep_the_window_pages_behind_the_window,
    keep_a_tail_of_one_page_too_few,
    keep_the_tail_of_another_position,
    free_the_pages_of_a_tail_with_its_request,
    free_the_pages_that_requests_hold_with_a_tail,
    share_part_of_a_window_page_with_a_fork,
    lose_the_copies_of_forks,
    send_one_window_page_too_few,
    take_a_divided_slab_for_a_window,
    count_the_pages_in_the_place_of_tails_as_taken,
    free_the_window_pages_of_a_store_in_flight,
    copy_one_window_page_too_few,
    share_the_window_pages_of_other_entries,
    attach_the_tail_of_a_failed_copy,
)
