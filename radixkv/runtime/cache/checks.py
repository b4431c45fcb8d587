"""Checks that every page of a cache is in exactly one place, and that its counts say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixkv.errors import InvariantError
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.tree.node import Namespace

if TYPE_CHECKING:
    from radixkv.runtime.cache.cache import PageCache


def check_counts(cache: PageCache, n_private: int) -> None:
    """Checks that free, reachable, detached and private pages add up to the pool. O(1).

    Args:
        cache: the cache.
        n_private: how many private pages it has counted.

    Raises:
        InvariantError: a bug in radixkv.
    """
    tree = cache.tree
    tree.check(deep=False)
    n_lost = cache.window_pages.n_pages_replaced
    if cache.n_free + tree.n_pages_reachable + tree.n_pages_detached + n_private + n_lost != cache.n_pages:
        raise InvariantError(
            f"{cache.n_free} free, {tree.n_pages_reachable} reachable, {tree.n_pages_detached} detached, "
            f"{n_private} private pages and {n_lost} in the place of window pages do not add up to the pool's "
            f"{cache.n_pages}"
        )


def check_pages(
    cache: PageCache, free: Iterable[int], n_private: int, block_tables: Iterable[BlockTable]
) -> Counter[Namespace]:
    """Checks that every page has one owner, and that block tables start with their leased pages.

    O(pages + length of all block tables).

    Args:
        cache: the cache.
        free: its free pages.
        n_private: how many private pages it has counted.
        block_tables: all open block tables.

    Returns:
        The number of private pages by namespace.

    Raises:
        InvariantError: a bug in radixkv.
    """
    owners: dict[int, str] = {}
    _claim(owners, "the free list", free)
    _claim(owners, "the tree", cache.tree.reachable_pages())
    _claim(owners, "a detached path", cache.tree.detached_pages())
    n_private_of: Counter[Namespace] = Counter()
    block_tables = list(block_tables)
    cache.window_pages.check((blocks.window, len(blocks.pages)) for blocks in block_tables)
    _claim(owners, "a window page", cache.window_pages.replaced_pages())
    for index, blocks in enumerate(block_tables):
        private = blocks.private_pages
        _claim(owners, f"block table {index}", private)
        n_private_of[blocks.namespace] += len(private)
        leased = [] if blocks.lease is None else cache.tree.pages(blocks.lease)
        if blocks.pages[: blocks.n_leased] != leased:
            raise InvariantError(
                f"block table {index} starts with {blocks.pages[: blocks.n_leased]}, but its lease holds {leased}"
            )
    if owners.keys() != set(range(cache.n_pages)):
        raise InvariantError(f"pages without an owner: {sorted(set(range(cache.n_pages)) - owners.keys())[:8]}")
    if n_private_of.total() != n_private:
        raise InvariantError(f"{n_private_of.total()} pages are private, but {n_private} were counted")
    return n_private_of


def _claim(owners: dict[int, str], owner: str, pages: Iterable[int]) -> None:
    for page in pages:
        if page in owners:
            raise InvariantError(f"page {page} is owned by {owners[page]} and by {owner}")
        owners[page] = owner
