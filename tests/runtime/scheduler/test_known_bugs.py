"""Bugs that other engines had, named by their symptoms and numbered as in the project's list of prior art."""

from __future__ import annotations

import pytest

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.request import Phase
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt


def test_bug_01_duplicate_pages_freed_while_a_live_table_points_at_them() -> None:
    engine = Engine(64, 4)
    first = engine.add(prompt(16), max_tokens=12)
    second = engine.add(prompt(16), max_tokens=12, reads_cache=False)
    n_duplicates = 0
    while not engine.scheduler.is_idle:
        engine.turn()
        for request in (first, second):
            if request.block_table is not None:
                n_duplicates += len(request.block_table.replaced)
                assert not set(request.block_table.pages) & set(engine.free_pages)
    assert n_duplicates > 0, "two requests committed the same tokens"
    engine.check_outputs()
    engine.check_idle()


def test_bug_02_the_lock_skipped_the_handles_own_node() -> None:
    engine = Engine(16, 4)
    engine.add(prompt(16), max_tokens=30)
    engine.turn()
    assert engine.cache.tree.evict(16) == []
    engine.run_to_the_end("length")


def test_bug_03_a_node_stored_a_view_of_a_table_that_was_overwritten() -> None:
    engine = Engine(64, 4)
    first = engine.add(prompt(17), max_tokens=1)
    engine.launch()
    pages = list(first.block_table.pages[:4])
    first.known_key[:64] = bytes(64)
    table = first.block_table.pages
    table[:4] = [0, 0, 0, 0]
    probe = engine.cache.open(Namespace(), b"".join(t.to_bytes(4, "little") for t in prompt(17)))
    assert probe.pages == pages
    engine.cache.close(probe)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_bug_04_eviction_asked_in_pages_counted_in_tokens(page_size: int) -> None:
    engine = Engine(32, page_size)
    engine.serve(prompt(8 * page_size), max_tokens=1)
    n_reachable = engine.cache.tree.n_pages_reachable
    runs = engine.cache.tree.evict(3)
    assert sum(len(run.pages) for run in runs) == 3
    assert all(len(run.tokens) == 4 * page_size * len(run.pages) for run in runs)
    assert engine.cache.tree.n_pages_reachable == n_reachable - 3


def test_bug_06_abort_or_finish_frees_pages_that_a_launched_step_uses() -> None:
    engine = Engine(64, 4)
    aborted = engine.add(prompt(15), max_tokens=20)
    stopping = engine.add(prompt(15, first=2), max_tokens=20)
    engine.turn(2)
    stopping.stop_token_ids = frozenset(range(1000))
    for request in (aborted, stopping):
        assert request.n_in_flight > 0
    tables = [set(r.block_table.pages) for r in (aborted, stopping) if r.block_table is not None]
    engine.abort(aborted)
    engine.turn()
    assert engine.ended[stopping.id].reason == "stop"
    in_flight = {r for launched in engine.scheduler.launched_plans for r in launched.requests}
    free = set(engine.free_pages)
    for request, table in zip((aborted, stopping), tables, strict=True):
        assert request not in in_flight or not table & free
    assert stopping in in_flight, "the step after the last token was launched already"
    engine.run()
    engine.check_idle()


def test_bug_08_a_full_hit_leaves_nothing_to_compute() -> None:
    engine = Engine(64, 4)
    engine.serve(prompt(16), max_tokens=1)
    waiting = engine.add(prompt(16), max_tokens=3)
    (row,) = engine.launch().rows
    assert (row.start, row.n_tokens, row.write_start) == (15, 1, 16), "one token computed, nothing written"
    engine.run_to_the_end()
    assert waiting.cache_use.counted.n_cached == 15


def test_bug_09_counts_are_stale_after_preemption_or_failed_admission() -> None:
    engine = Engine(20, 4, max_num_seqs=4)
    requests = [engine.add(prompt(9, first=i), max_tokens=30) for i in range(4)]
    while engine.scheduler.n_preemptions == 0:
        engine.turn()
    while not (preempted := [r for r in requests if r.phase is Phase.WAITING]):
        engine.turn()
    engine.cache.flush()
    big = engine.add(prompt(70, first=9), max_tokens=4)
    engine.turn()
    assert big.block_table is None, "it does not fit"
    engine.run_to_the_end()
    assert [engine.ended[r.id].reason for r in (*preempted, big)] == ["length"] * (len(preempted) + 1)
    engine.cache.tree.evict(20)
    assert engine.cache.tree.namespaces() == [], "a failed admission leaves no lease"


def test_bug_12_overlap_lets_a_decode_step_see_other_slots() -> None:
    def trace(*, overlap: bool) -> dict[str, list[tuple[int, int, list[int]]]]:
        engine = Engine(64, 4)
        for i in range(6):
            engine.add(prompt(9 + i, first=i % 2), max_tokens=10)
        rows: dict[str, list[tuple[int, int, list[int]]]] = {}
        while not engine.scheduler.is_idle:
            plan = engine.launch()
            for row in plan.rows if plan is not None else ():
                request = engine.rows[plan.step, row.batch_slot] if plan is not None else None
                rows.setdefault(request.id, []).append((row.start, row.n_tokens, list(request.block_table.pages)))
            if not overlap or plan is None or len(engine.pending) > 1:
                engine.collect()
        engine.check_outputs()
        return rows

    assert trace(overlap=True) == trace(overlap=False)


def test_bug_13_committed_kv_leads_the_known_tokens_by_one() -> None:
    engine = Engine(64, 4)
    request = engine.add(prompt(8), max_tokens=9)
    while not engine.scheduler.is_idle:
        engine.turn()
        if request.block_table is not None:
            assert request.block_table.n_leased * 4 <= request.n_known
    # 17 tokens are known; the KV of the last was never computed, so 16 can be in the tree.
    assert engine.cache.tree.match(Namespace(), bytes(request.known_key)) == 16


def test_bug_13_an_abort_commits_an_unknown_token() -> None:
    engine = Engine(64, 1)
    request = engine.add(prompt(8), max_tokens=9)
    engine.launch()
    engine.launch()
    engine.abort(request)
    engine.run_to_the_end()
    assert engine.cache.tree.match(Namespace(), bytes(request.known_key)) == 8


def test_bug_14_evictable_counted_shared_pages_twice() -> None:
    engine = Engine(64, 4)
    for i in range(4):
        engine.add(prompt(16) + prompt(8, first=i + 2), max_tokens=6)
    while not engine.scheduler.is_idle:
        engine.turn()
        tree = engine.cache.tree
        block_tables = engine.scheduler.running.block_tables()
        leased = {page for blocks in block_tables for page in blocks.pages[: blocks.n_leased]}
        assert tree.n_pages_leased == len(leased)
        assert tree.n_pages_evictable == len(set(tree.reachable_pages()) - leased)
    assert engine.cache.n_available == 64


@pytest.mark.parametrize("namespace", [Namespace(salt="a"), Namespace(adapter="a"), Namespace(tenant="a")])
def test_bug_16_a_salt_equal_to_an_adapters_name_cross_reuses(namespace: Namespace) -> None:
    engine = Engine(64, 4)
    for other in (Namespace(), Namespace(salt="a"), Namespace(adapter="a"), Namespace(tenant="a")):
        if other != namespace:
            engine.add(prompt(17), max_tokens=2, namespace=other)
    engine.run()
    late = engine.add(prompt(17), max_tokens=2, namespace=namespace)
    engine.run_to_the_end()
    assert late.cache_use.counted.n_cached == 0


def test_bug_17_new_weights_reuse_old_kv() -> None:
    engine = Engine(64, 4)
    for epoch in (0, 1, 0):
        engine.serve(prompt(17), max_tokens=2, namespace=Namespace(epoch=epoch))
    assert [request.cache_use.counted.n_cached for request in engine.requests.values()] == [0, 0, 16]
    engine.check_outputs()


@pytest.mark.parametrize("budget", [9, 64])
def test_bug_20_prompt_logprobs_crash_or_are_stale_on_a_hit(budget: int) -> None:
    engine = Engine(64, 4, max_num_batched_tokens=budget, max_num_seqs=4)
    engine.serve(prompt(18), max_tokens=4)
    with_logprobs = engine.serve(prompt(18), max_tokens=4, n_prompt_logprobs=1)
    assert with_logprobs.cache_use.counted.n_cached == 0
    filler = engine.serve(prompt(30, first=4), max_tokens=1, n_prompt_logprobs=1)
    reader = engine.add(prompt(30, first=4), max_tokens=1)
    engine.run_to_the_end()
    assert len(engine.prompt_logprobs[with_logprobs.id]) == 17
    assert filler.cache_use.counted.n_cached == 0
    assert reader.cache_use.counted.n_cached == 28, "the request with prompt logprobs has filled the cache"


def test_bug_21_the_hit_rate_counts_retried_lookups() -> None:
    engine = Engine(20, 4, max_num_seqs=4)
    requests = [engine.add(prompt(9, first=i), max_tokens=30) for i in range(4)]
    engine.run()
    assert engine.scheduler.n_preemptions > 0
    assert [request.cache_use.counted.n_cached for request in requests] == [0, 0, 0, 0], (
        "finding its own pages again is not a hit"
    )


def test_bug_22_longest_prefix_order_starves() -> None:
    engine = Engine(256, 4, max_num_seqs=1, lpm_max_passes=5)
    engine.serve(prompt(40), max_tokens=1)
    unlucky = engine.add(prompt(40, first=9), max_tokens=1)
    urgent = [engine.add([*prompt(40), i], max_tokens=1, priority=-1) for i in range(10)]
    for i in range(30):
        engine.add([*prompt(40), 20 + i], max_tokens=1)
    engine.run_to_the_end()
    ended = list(engine.ended)
    assert set(ended[1:11]) == {request.id for request in urgent}
    assert ended.index(unlucky.id) - 11 <= 1 + 5 + 1


def test_a_prompt_for_which_a_step_has_no_room_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that ends on a page boundary may leave less than a page of the step for the next prompt."""
    engine = Engine(128, 4, max_num_seqs=8, max_num_batched_tokens=15)
    engine.serve(prompt(8), max_tokens=1)
    hits: list[BlockTable] = []
    count_hit = engine.cache.count_hit

    def counted(blocks: BlockTable) -> None:
        hits.append(blocks)
        count_hit(blocks)

    monkeypatch.setattr(engine.cache, "count_hit", counted)
    requests = [engine.add([*prompt(8), *prompt(12, first=10 * i + 10)], max_tokens=1) for i in range(6)]
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in requests] == [8] * 6
    assert len(hits) == 6
