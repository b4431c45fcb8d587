"""Mutants of the pages behind every layer's window, which requests without a lease free while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.windows import Windows
from radixkv.runtime.scheduler.running import RunningRequests

Patch = pytest.MonkeyPatch


def free_a_page_with_a_position_of_the_window(patch: Patch) -> None:
    n_behind = Windows.n_behind
    patch.setattr(Windows, "n_behind", lambda self, blocks, n_tokens: n_behind(self, blocks, n_tokens + 1))


def keep_the_pages_behind_the_window(patch: Patch) -> None:
    def free_behind(self: PageCache, blocks: BlockTable, n_tokens: int) -> None:
        """Counts the pages as freed, or the scheduler would wait for them for ever, and frees nothing."""
        blocks.n_freed = max(blocks.n_freed, self.windows.n_behind(blocks, n_tokens))

    patch.setattr(PageCache, "free_behind", free_behind)


def free_pages_of_the_tree(patch: Patch) -> None:
    def n_behind(self: Windows, blocks: BlockTable, n_tokens: int) -> int:
        return 0 if self.n_tokens is None else max(0, n_tokens + 1 - self.n_tokens) // self._page_size

    patch.setattr(Windows, "n_behind", n_behind)


def copy_freed_pages_to_a_fork(patch: Patch) -> None:
    patch.setattr(Windows, "first_copied", lambda self, blocks, n_tokens: blocks.n_leased)


def admit_no_prompt_that_is_longer_than_the_pool(patch: Patch) -> None:
    init = RunningRequests.__init__

    def mutant(self: RunningRequests, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        self._max_private_pages = None

    patch.setattr(RunningRequests, "__init__", mutant)


OF_WINDOWS: tuple[Callable[[Patch], None], ...] = (
    free_a_page_with_a_position_of_the_window,
    keep_the_pages_behind_the_window,
    free_pages_of_the_tree,
    copy_freed_pages_to_a_fork,
    admit_no_prompt_that_is_longer_than_the_pool,
)
