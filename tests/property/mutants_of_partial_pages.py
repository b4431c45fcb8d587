"""Mutants of the copies of pages that share their first tokens with a prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.tree.neighbours import Neighbours

Patch = pytest.MonkeyPatch


def release_the_source_of_a_partial_copy_early(patch: Patch) -> None:
    copy_partial_page = PageCache.copy_partial_page

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> int:
        n_copied = copy_partial_page(self, blocks, tokens, n_tokens)
        if blocks.source is not None:
            self.release_sources([blocks.source])
            blocks.source = None
        return n_copied

    patch.setattr(PageCache, "copy_partial_page", mutant)


def copy_a_part_of_a_page_that_is_not_computed(patch: Patch) -> None:
    patch.setattr(Neighbours, "nearest_computed", Neighbours.nearest)


def count_a_token_too_many_as_copied(patch: Patch) -> None:
    copy_partial_page = PageCache.copy_partial_page

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> int:
        n_copied = copy_partial_page(self, blocks, tokens, n_tokens)
        n_left = n_tokens - blocks.n_leased * self.page_size - n_copied
        return n_copied + (n_copied > 0 and n_left > 0)

    patch.setattr(PageCache, "copy_partial_page", mutant)


def leave_out_the_copy_of_a_part(patch: Patch) -> None:
    copy_partial_page = PageCache.copy_partial_page

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> int:
        n_copied = copy_partial_page(self, blocks, tokens, n_tokens)
        blocks.copies = []
        return n_copied

    patch.setattr(PageCache, "copy_partial_page", mutant)


def never_release_the_source_of_a_copy(patch: Patch) -> None:
    patch.setattr(PageCache, "release_sources", lambda self, sources: None)


OF_PARTIAL_PAGES: tuple[Callable[[Patch], None], ...] = (
    release_the_source_of_a_partial_copy_early,
    copy_a_part_of_a_page_that_is_not_computed,
    count_a_token_too_many_as_copied,
    leave_out_the_copy_of_a_part,
    never_release_the_source_of_a_copy,
)
