"""The block tables of running requests, as a message: which pages they have, and who else has them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.tiers import AwaitedPages, Tiers
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.tree.node import Node, path_to, upwards
from radixkv.wire.table_messages import ChoiceTable, GetTables, PageKind, PoolUse, RequestTables, Tabled, TablePage

MAX_LISTED_CHOICES = 512
"""Choices of an answer with the counts of all requests."""
MAX_SHOWN_PAGES = 4096
"""Entries of an answer with tables page by page, which its choices share. Their texts take a tenth of the longest
frame."""
MIN_SHOWN_PAGES = 16
"""Entries that each choice can have, however many choices there are."""


class _Held(NamedTuple):
    """The pages of one request, and what it still waits for."""

    blocks: BlockTable | None
    awaited: AwaitedPages | None


def make_tables(scheduler: Scheduler, message: GetTables, requests: Iterable[Sequence[Request]]) -> Tabled:
    """Returns the answer to ``GetTables``. Changes nothing.

    O(block tables · edges of their paths), and O(pages told). The pages that a request waits for in a copy that was
    begun for another one are counted only if the message names the request, in O(tokens) for each of its choices.

    Args:
        scheduler: has the caches.
        message: the question.
        requests: the choices of each request that has not ended, in the order of arrival.
    """
    tiers = scheduler.tiers
    tables = list(_open_tables(scheduler))
    n_refs = _count_references(tables)
    asked = frozenset(message.requests)
    chosen = [choices for choices in requests if not asked or choices[0].id in asked]
    told: list[RequestTables] = []
    n_left = MAX_LISTED_CHOICES
    n_choices = sum(map(len, chosen))
    n_pages = max(MIN_SHOWN_PAGES, MAX_SHOWN_PAGES // max(1, n_choices)) if asked else 0
    for choices in chosen:
        if len(choices) > n_left:
            break
        n_left -= len(choices)
        shown = range(message.first, message.first + n_pages)
        of_choices = tuple(
            _choice_table(one, _held(one, tiers, are_counted=bool(asked)), n_refs, scheduler.cache, shown)
            for one in choices
        )
        told.append(RequestTables(choices[0].id, choices[0].sender, of_choices))
    return Tabled(message.id, _pool_use(scheduler.cache, tables, n_refs), tuple(told), len(chosen) - len(told))


def _open_tables(scheduler: Scheduler) -> Iterator[BlockTable]:
    """Yields the block tables of running, releasing and loading requests."""
    yield from scheduler.running.block_tables()
    for request in scheduler.tiers.requests():
        if (blocks := scheduler.tiers.awaited(request, are_counted=False).blocks) is not None:
            yield blocks


def _held(request: Request, tiers: Tiers, *, are_counted: bool) -> _Held:
    if request.phase is Phase.LOADING:
        awaited = tiers.awaited(request, are_counted=are_counted)
        return _Held(awaited.blocks, awaited)
    return _Held(request.block_table, None)


def _count_references(tables: Iterable[BlockTable]) -> Counter[Node]:
    """Returns how many tables lease each node: these and no others have its pages."""
    return Counter(
        node for blocks in tables if blocks.lease is not None for node in upwards(blocks.lease.node) if node.pages
    )


def _pool_use(cache: PageCache, tables: Iterable[BlockTable], n_refs: Counter[Node]) -> PoolUse:
    """Counts every page of the pool once."""
    n_own = sum(len(blocks.private_pages) for blocks in tables)
    n_leased = sum(len(node.pages) for node in n_refs)
    n_in_tree = cache.tree.n_pages_reachable + cache.tree.n_pages_detached
    n_replaced = cache.window_pages.n_pages_replaced
    return PoolUse(
        n_pages=cache.n_pages,
        n_free=cache.n_free,
        n_leased=n_leased,
        n_own=n_own,
        n_cached=n_in_tree - n_leased,
        n_copied=cache.n_pages - cache.n_free - n_in_tree - n_own - n_replaced,
        n_replaced=n_replaced,
    )


def _choice_table(
    request: Request, held: _Held, n_refs: Counter[Node], cache: PageCache, shown: range
) -> ChoiceTable:
    """Returns the table of a choice, with the entries ``shown`` page by page."""
    blocks, awaited = held
    table = ChoiceTable(
        choice=request.choice,
        phase=request.phase.value,
        n_prompt=request.n_prompt,
        n_known=request.n_known,
        n_stored=0,
        batch_slot=request.batch_slot if request.batch_slot >= 0 else None,
    )
    if awaited is not None:
        table = replace(table, n_loading=awaited.n_pages, loading_from=awaited.tier, load_stage=awaited.stage)
    if blocks is None:
        return table if awaited is None else replace(table, pages=_without_table(awaited, cache.page_size, shown))
    path = [] if blocks.lease is None else path_to(blocks.lease.node)
    n_not_own = max(blocks.n_leased, blocks.n_freed)
    n_dropped = blocks.n_dropped
    return replace(
        table,
        n_stored=max(request.n_scheduled, blocks.n_leased * cache.page_size),
        n_in_tree=blocks.n_leased,
        n_shared=sum(len(node.pages) for node in path if n_refs[node] > 1),
        n_own=len(blocks.pages) - n_not_own - n_dropped - table.n_loading,
        n_freed=n_not_own - blocks.n_leased + n_dropped,
        n_skipped=len(blocks.skipped) - n_dropped,
        n_window_pages=len(blocks.window.pages),
        n_replaced=len(blocks.replaced),
        pages=tuple(_pages(blocks, awaited, path, n_refs, cache, request.n_scheduled, shown)) if shown else (),
    )


def _pages(
    blocks: BlockTable,
    awaited: AwaitedPages | None,
    path: Sequence[Node],
    n_refs: Counter[Node],
    cache: PageCache,
    n_stored: int,
    shown: range,
) -> Iterator[TablePage]:
    """Yields the entries ``shown`` of a block table. O(edges + entries)."""
    nodes = [node for node in path if node.pages]
    ends = list(accumulate(len(node.pages) for node in nodes))
    skipped = set(blocks.skipped)
    slots, window, page_size = () if awaited is None else awaited.slots, blocks.window, cache.page_size
    for entry in range(shown.start, min(shown.stop, len(blocks.pages))):
        page = blocks.pages[entry]
        in_window = 0 <= entry - window.first < len(window.pages)
        window_page = window.pages[entry - window.first] if in_window else None
        if entry < blocks.n_leased:
            index = bisect_right(ends, entry)
            node = nodes[index]
            has_state = cache.recurrent_states is not None and entry + 1 == ends[index]
            state_slot = node.state.slot if has_state and node.state is not None else None
            kind: PageKind = "skipped" if entry in skipped else "tree"
            yield TablePage(entry, page, page_size, kind, n_refs[node], "device", None, window_page, state_slot)
        elif entry < blocks.n_freed or entry in skipped:
            yield TablePage(entry, None, 0, "freed", 0, None, window_page=window_page)
        elif awaited is not None and 0 <= entry - awaited.first < awaited.n_pages:
            slot = slots[entry - awaited.first] if slots else None
            yield TablePage(entry, page, page_size, "loading", 1, awaited.tier, slot, window_page)
        else:
            n_filled = min(max(0, n_stored - entry * page_size), page_size)
            yield TablePage(entry, page, n_filled, "own", 1, "device", window_page=window_page)


def _without_table(awaited: AwaitedPages, page_size: int, shown: range) -> tuple[TablePage, ...]:
    """Returns the entries ``shown`` of a request that has no block table yet, and waits for a copy."""
    entries = range(max(shown.start, awaited.first), min(shown.stop, awaited.first + awaited.n_pages))
    slots = awaited.slots
    return tuple(
        TablePage(
            entry, None, page_size, "loading", 0, awaited.tier, slots[entry - awaited.first] if slots else None
        )
        for entry in entries
    )
