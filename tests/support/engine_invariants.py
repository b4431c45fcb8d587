"""What must hold of scheduler and caches between any two halves of a step, beside their own checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from radixkv.runtime.adapters.slot_queue import SlotQueue
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.reporting.block_tables import make_tables
from radixkv.runtime.reporting.slot_use import count_slot_use, tables_of
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.tenants.shares import TenantShares
from radixkv.runtime.tiers.tier_link import TierLink
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.table_messages import ChoiceTable, GetTables


def check_pins(caches: Iterable[PageCache], budget: float) -> None:
    """Checks that pins cover no more than their budgets."""
    for cache in caches:
        retentions = cache.tree.retentions
        assert retentions.n_pages <= cache.n_pages // 2
        for namespace in cache.tree.namespaces():
            assert retentions.n_pages_of(namespace) <= budget * cache.n_pages


def _held(blocks: BlockTable) -> list[tuple[int, int]]:
    """Returns the entries of a block table whose pages were not freed, with the pages."""
    return [
        (entry, page)
        for entry, page in enumerate(blocks.pages)
        if entry >= blocks.n_freed and (entry < blocks.n_leased or entry not in blocks.skipped)
    ]


def check_slot_use(running: RunningRequests, page_size: int) -> None:
    """Checks the counts of used slots against lists of all slots and of the tokens that each stands for."""
    tables = [(request, request.blocks) for request in (*running, *running.releasing)]
    pages: set[int] = set()
    contents: dict[tuple[int, int], object] = {}
    leased: list[int] = []
    listed: set[int] = set()
    """Leased pages whose contents are there."""
    for request, blocks in tables:
        tokens = bytes(request.known_key)
        leased += blocks.pages[: blocks.n_leased]
        n_filled = max(request.n_scheduled, blocks.n_leased * page_size)
        for entry, page in [*_held(blocks), *((replaced.entry, replaced.page) for replaced in blocks.replaced)]:
            pages.add(page)
            if page in listed:
                continue
            if entry < blocks.n_leased:
                listed.add(page)
            is_compared = blocks.lease is not None and (entry < blocks.n_leased or not blocks.skipped)
            for position in range(entry * page_size, min(n_filled, (entry + 1) * page_size)):
                slot, n_bytes = (page, position % page_size), (position + 1) * TOKEN_BYTES
                # Leading tokens as bytes: tuples of them would take half the time of all tests with an engine.
                is_known = is_compared and n_bytes <= len(tokens)
                contents[slot] = (request.namespace, tokens[:n_bytes]) if is_known else slot
    use = count_slot_use(tables_of((*running, *running.releasing)), page_size)
    assert (use.n_slots, use.n_filled) == (len(pages) * page_size, len(contents))
    assert use.n_saved == (len(leased) - len(set(leased))) * page_size
    n_duplicate = len(contents) - len(set(contents.values()))
    assert use.n_duplicate <= n_duplicate
    if not any(blocks.lease and blocks.lease.detached for _, blocks in tables):
        assert use.n_duplicate == n_duplicate


def check_links(*links: TierLink[Any, Any]) -> None:
    """Checks that the pages which count as being stored are those of the stores in flight."""
    for link in links:
        assert link._n_pages_in_store == sum(store.n_counted for store in link._stores.values())


def check_tables(scheduler: Scheduler, requests: Collection[Sequence[Request]]) -> None:
    """Checks what is told of block tables against counts of the pages in all of them.

    Args:
        scheduler: has the tables.
        requests: the choices of each request that has not ended.
    """
    cache, running, tiers = scheduler.cache, scheduler.running, scheduler.tiers
    of_request = {request: request.blocks for request in (*running, *running.releasing)}
    for request in tiers.requests():
        if (blocks := tiers.awaited(request).blocks) is not None:
            of_request[request] = blocks
    held = {request: dict(_held(blocks)) for request, blocks in of_request.items()}
    in_tables = Counter(page for pages in held.values() for page in pages.values())
    in_tree = {*cache.tree.reachable_pages(), *cache.tree.detached_pages()}
    replaced = [one.page for blocks in of_request.values() for one in blocks.replaced]
    tabled = make_tables(scheduler, GetTables("t", tuple(choices[0].id for choices in requests)), requests)
    pool = tabled.pool
    assert (pool.n_pages, pool.n_free) == (cache.n_pages, cache.n_free)
    assert pool.n_leased == len(in_tables.keys() & in_tree)
    assert pool.n_own == len({*in_tables, *replaced} - in_tree)
    assert pool.n_cached == len(in_tree - in_tables.keys())
    assert pool.n_copied >= 0
    parts = pool.n_free + pool.n_leased + pool.n_own + pool.n_cached + pool.n_copied + pool.n_replaced
    assert parts == pool.n_pages
    if pool.n_copied:
        assert tiers.block_tables(), "no copy is under way"
    if not requests:
        return
    assert [one.id for one in tabled.requests] == [choices[0].id for choices in requests]
    for told, choices in zip(tabled.requests, requests, strict=True):
        if any(len(one.pages) < one.n_in_tree + one.n_own + one.n_freed + one.n_loading for one in told.choices):
            # An answer about many requests has some entries of each. One about this request has all.
            (told,) = make_tables(scheduler, GetTables("t", (told.id,)), requests).requests
        for table, request in zip(told.choices, choices, strict=True):
            blocks = of_request.get(request)
            _check_table(table, request, blocks, held.get(request, {}), in_tables, in_tree, cache.page_size)


def _check_table(
    table: ChoiceTable,
    request: Request,
    blocks: BlockTable | None,
    held: Mapping[int, int],
    in_tables: Mapping[int, int],
    in_tree: Collection[int],
    page_size: int,
) -> None:
    assert (table.choice, table.phase) == (request.choice, request.phase.value)
    n_read = table.n_in_tree - table.n_skipped
    counts = {"tree": n_read, "skipped": table.n_skipped, "own": table.n_own, "freed": table.n_freed}
    counts["loading"] = table.n_loading
    kinds = [page.kind for page in table.pages]
    assert {kind: kinds.count(kind) for kind in counts} == counts
    assert sum(counts.values()) == len(kinds)
    if blocks is None:
        assert (table.n_in_tree, table.n_own, table.n_freed) == (0, 0, 0)
        assert all(page.page is None for page in table.pages)
        return
    assert [page.entry for page in table.pages] == list(range(len(blocks.pages)))
    assert table.n_shared == sum(in_tables[page] > 1 for page in held.values())
    window = dict(enumerate(blocks.window.pages, blocks.window.first))
    for page, physical in zip(table.pages, blocks.pages, strict=True):
        assert page.window_page == window.get(page.entry)
        if page.entry not in held:
            assert (page.kind, page.page, page.n_refs, page.tier) == ("freed", None, 0, None)
            continue
        assert (page.page, page.n_refs) == (physical, in_tables[physical])
        assert (page.kind in ("tree", "skipped")) == (physical in in_tree)
        assert (page.tier == "device") == (page.kind != "loading")
    if request.phase is Phase.RUNNING:
        n_filled = table.n_freed * page_size + sum(page.n_filled for page in table.pages)
        assert n_filled == table.n_stored == max(request.n_scheduled, blocks.n_leased * page_size)


def check_requests(scheduler: Scheduler, live: Sequence[Request], free_pages: Collection[int]) -> None:
    """Checks that each live request is in one place, and that its pages are those of its phase.

    Args:
        scheduler: has the requests.
        live: all choices that have not ended.
        free_pages: of the device's pool.
    """
    waiting, running = list(scheduler.waiting), list(scheduler.running)
    releasing = scheduler.running.releasing
    preempted = [r for r in releasing if r.phase is Phase.PREEMPTED]
    following = [follower for r in live for follower in r.followers]
    loading = scheduler.tiers.requests()
    assert all(r.phase is Phase.LOADING for r in loading)
    held = [r for r in live if r.phase is Phase.PAUSED]
    assert all(r.is_paused and r.block_table is None for r in held)
    placed = (*waiting, *_in_line(scheduler.waiting), *loading, *running, *preempted, *following, *held)
    assert sorted(r.serial for r in live) == sorted(r.serial for r in placed)
    assert all(r.phase is Phase.FOLLOWING for r in following)
    assert [r.order for r in waiting] == sorted(r.order for r in waiting)
    for leader in {r.leader for r in (*running, *releasing) if r.leader is not None}:
        assert leader in (*running, *releasing), "a fork copies from freed pages"
    if isinstance(scheduler.shares, TenantShares):
        n_rows = Counter(r.sender for r in (*running, *releasing))
        assert all(scheduler.shares.count(r.sender)[0] == n_rows[r.sender] for r in live), (
            "rows are counted wrongly"
        )
    free, page_size = set(free_pages), scheduler.cache.page_size
    for request in running:
        blocks = request.block_table
        assert blocks is not None
        assert blocks.n_leased * page_size <= request.n_known, "more KV is committed than tokens are known"
        assert request.n_scheduled <= len(blocks.pages) * page_size, "scheduled KV has no page"
        assert not free & {page for _, page in _held(blocks)}, "a live table points at a free page"


def _in_line(queue: Queue) -> list[Request]:
    """Returns the requests that wait for a slot of their adapter, in front of the queue."""
    if not isinstance(queue, SlotQueue):
        return []
    return [request for line in queue._lines.values() for request in line.requests.values()]
