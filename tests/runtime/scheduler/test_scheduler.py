"""The scheduler with the real cache and tree; the device is fake, outputs are checked against a naive model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from radixkv.errors import InvariantError, QueueFull
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.shared_prefixes import MIN_SHARED_TOKENS
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.tree.node import Namespace
from support.engine import Engine, prompt


def run_and_list_preempted(engine: Engine) -> list[str]:
    """Runs to the end; returns the ids of preempted requests in the order of their first preemption."""
    preempted: list[str] = []
    while not engine.scheduler.is_idle:
        engine.turn()
        waiting = (r.id for r in engine.scheduler.waiting if r.first_row is not None)
        preempted += [id for id in waiting if id not in preempted]
    return preempted


def test_one_request_from_prompt_to_end() -> None:
    engine = Engine()
    engine.add(prompt(10), max_tokens=5)
    engine.run_to_the_end("length")
    assert engine.n_computed == 10 + 4, "the last token is never computed"


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    engine = Engine()
    free = engine.serve(prompt(10), max_tokens=8)
    third = engine.output(free)[2]
    stopped = engine.add(prompt(10), max_tokens=8, stop=[third])
    engine.run_to_the_end()
    assert engine.ended[stopped.id].reason == "stop"
    assert engine.output(stopped) == engine.output(free)[:3]


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_many_requests_share_prefixes_and_get_their_own_outputs(policy: str, page_size: int) -> None:
    engine = Engine(256, page_size, schedule_policy=policy)
    for i in range(24):
        engine.add(prompt(33, first=i % 3) + prompt(i, first=i), max_tokens=1 + i % 7)
    engine.run_to_the_end()
    assert sum(r.cache_use.counted.n_cached for r in engine.requests.values()) > 24 * 16


def test_decode_rows_and_prompt_chunks_share_a_step_within_the_budget() -> None:
    engine = Engine(256, 4, max_num_batched_tokens=20)
    engine.add(prompt(6), max_tokens=30)
    engine.turn()
    engine.add(prompt(50, first=2), max_tokens=2)
    mixed = []
    for _ in range(12):
        plan = engine.launch()
        assert plan.n_tokens <= 20
        mixed.append(sorted(row.n_tokens for row in plan.rows))
        engine.collect()
    assert [1, 16] in mixed, "the chunk has 19 tokens of the budget left, and ends on a page boundary after 16"
    engine.run_to_the_end()


def test_chunks_but_the_last_end_on_a_page_boundary() -> None:
    engine = Engine(256, 4, max_num_batched_tokens=23, max_num_seqs=4)
    engine.serve(prompt(70), max_tokens=1)
    ends = [(row.start + row.n_tokens) for plan in engine.device.executed for row in plan.rows]
    assert ends == [20, 40, 60, 70]


def test_a_plan_lists_the_pages_that_its_rows_share() -> None:
    engine = Engine(256, 4, max_num_batched_tokens=256)
    common, first, second = prompt(24), [7] * 8, [8] * 8
    for tokens in (common + first + [1], prompt(30, first=3), common + second, common + first, common):
        engine.add(tokens, max_tokens=6)
    runs = []
    while not engine.scheduler.is_idle:
        plan = engine.launch()
        if plan is not None and plan.step > 0:
            runs.append([(run.rows, run.first_page, run.n_pages) for run in plan.shared_runs])
        engine.collect()
    assert runs == [[((0, 2, 3, 4), 0, 6), ((0, 3), 6, 2)]] * 5


def test_a_plan_lists_no_short_runs_and_none_if_disabled() -> None:
    for enabled, n_common, n_runs in (
        (True, MIN_SHARED_TOKENS, 1),
        (True, MIN_SHARED_TOKENS - 4, 0),
        (False, 80, 0),
    ):
        engine = Engine(
            256, max_num_batched_tokens=256, finds_shared_runs=enabled, min_shared_tokens=MIN_SHARED_TOKENS
        )
        for suffix in (1, 2):
            engine.add([*prompt(n_common), suffix], max_tokens=3)
        engine.turn()
        assert len(engine.launch().shared_runs) == n_runs


def test_two_new_requests_with_one_prefix_compute_it_once_in_the_same_step() -> None:
    engine = Engine()
    first = engine.add(prompt(17), max_tokens=2)
    second = engine.add(prompt(16) + [5, 6], max_tokens=2)
    assert [(row.start, row.n_tokens) for row in engine.launch().rows] == [(0, 17), (16, 2)]
    engine.run_to_the_end()
    assert (first.cache_use.counted.n_cached, second.cache_use.counted.n_cached) == (0, 16)


def test_a_chunked_prompt_uses_pages_that_another_commits_meanwhile() -> None:
    engine = Engine(256, 4, max_num_batched_tokens=16)
    first = engine.add(prompt(60), max_tokens=2)
    second = engine.add(prompt(60), max_tokens=2)
    engine.run_to_the_end()
    assert first.cache_use.counted.n_cached == 0
    assert second.cache_use.counted.n_cached == 59
    assert engine.n_computed == 60 + 1 + 2


def test_fcfs_admits_in_order_of_arrival_and_lpm_by_cached_prefix() -> None:
    for policy, order in (("fcfs", ["r1", "r2", "r3"]), ("lpm", ["r3", "r2", "r1"])):
        engine = Engine(256, 4, schedule_policy=policy, max_num_seqs=1)
        engine.serve(prompt(40), max_tokens=1)
        engine.add(prompt(40, first=9), max_tokens=1)
        engine.add(prompt(20) + prompt(20, first=8), max_tokens=1)
        engine.serve(prompt(40), max_tokens=1)
        assert list(engine.ended)[1:] == order


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_lower_priority_number_goes_first_whatever_is_cached(policy: str) -> None:
    engine = Engine(256, 4, schedule_policy=policy, max_num_seqs=1)
    engine.serve(prompt(40), max_tokens=1)
    for first, priority in ((1, 1), (9, 0), (1, 0), (8, -1)):
        engine.add(prompt(40, first=first), max_tokens=1, priority=priority)
    engine.run()
    order = ["r4", "r3", "r2", "r1"] if policy == "lpm" else ["r4", "r2", "r3", "r1"]
    assert list(engine.ended)[1:] == order


@pytest.mark.parametrize(
    ("priorities", "first_preempted", "oldest"),
    [((0, 0, 0, 0), ["r3"], "r0"), ((1, 0, 1, 0), ["r2", "r0"], "r1")],
    ids=["one priority", "two priorities"],
)
def test_out_of_pages_preempts_the_last_arrival_of_the_lowest_priority_and_never_the_oldest(
    priorities: Sequence[int], first_preempted: list[str], oldest: str
) -> None:
    engine = Engine(20, 4, max_num_seqs=4)
    for i, priority in enumerate(priorities):
        engine.add(prompt(9, first=i), max_tokens=30, priority=priority)
    order = run_and_list_preempted(engine)
    assert order[: len(first_preempted)] == first_preempted
    assert oldest not in order
    assert list(engine.ended)[0] == oldest
    engine.run_to_the_end()


@pytest.mark.nightly
def test_a_preemption_that_ignores_priority_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "priority", property(lambda request: 0))
    with pytest.raises(AssertionError):
        test_out_of_pages_preempts_the_last_arrival_of_the_lowest_priority_and_never_the_oldest(
            (1, 0, 1, 0), ["r2", "r0"], "r1"
        )


def test_only_requests_that_wait_for_their_first_step_count_for_a_full_queue() -> None:
    engine = Engine(20, 4, max_num_seqs=2, max_queued_requests=1)
    for i in range(2):
        engine.add(prompt(9, first=i), max_tokens=40)
        engine.turn()
    while not any(request.phase is Phase.WAITING for request in engine.requests.values()):
        engine.turn()
    engine.add(prompt(9, first=5), max_tokens=1)
    with pytest.raises(QueueFull):
        engine.add(prompt(9, first=6), max_tokens=1)
    engine.run_to_the_end()


def test_lpm_ranks_only_its_window() -> None:
    engine = Engine(256, 4, max_num_seqs=1, lpm_window=2)
    engine.serve(prompt(40), max_tokens=1)
    engine.add(prompt(40, first=9), max_tokens=1)
    engine.add(prompt(40, first=8), max_tokens=1)
    engine.serve(prompt(40), max_tokens=1)
    assert list(engine.ended)[1] == "r1"


def test_a_full_queue_refuses() -> None:
    engine = Engine(max_queued_requests=2)
    engine.add(prompt(5))
    engine.add(prompt(5))
    with pytest.raises(QueueFull, match="2 requests wait"):
        engine.add(prompt(5))
    engine.run_to_the_end()


@pytest.mark.parametrize(
    ("n_tokens", "share", "n_running", "n_reserved"),
    [
        (16, 1 / 24, 1, 4),
        (16, 1 / 24, 2, 8),
        (16, 1 / 24, 3, 10),
        (16, 1 / 24, 6, 10),
        (64, 1 / 16, 2, 15),
        (0, 1.0, 3, 0),
        (1000, 0.0, 3, 0),
        (1 << 40, 0.5, 1, 120),
    ],
)
def test_admission_leaves_pages_for_running_requests(
    n_tokens: int, share: float, n_running: int, n_reserved: int
) -> None:
    """These are the pages of so many tokens for each running request, up to a share of the pool's 240."""
    for n_excess in (0, 1):
        engine = Engine(
            240,
            4,
            max_num_batched_tokens=1024,
            admission="reserved",
            num_reserved_decode_tokens=n_tokens,
            max_reserved_decode_share=share,
        )
        for i in range(n_running):
            engine.add([i, *prompt(12)], max_tokens=8)
        engine.turn()
        n_pages = engine.cache.n_available - n_reserved + n_excess
        engine.add([50, *prompt(4 * n_pages - 1)], max_tokens=2)
        engine.turn()
        assert len(engine.scheduler.running) == n_running + 1 - n_excess
        engine.run_to_the_end()


def test_many_requests_in_a_small_pool_are_rarely_preempted() -> None:
    """All prompts and outputs have one length, so all rows need their pages in the same steps: the worst case."""
    engine = Engine(96, 4, max_num_seqs=64, max_num_batched_tokens=512)
    requests = [engine.add([i, *prompt(7, first=i)], max_tokens=24) for i in range(60)]
    n_preempted = dict.fromkeys(requests, 0)
    while not engine.scheduler.is_idle:
        running = list(engine.scheduler.running)
        engine.turn()
        for request in running:
            n_preempted[request] += request.phase in (Phase.PREEMPTED, Phase.WAITING)
    engine.check_outputs()
    engine.check_idle()
    assert max(n_preempted.values()) <= 3
    assert engine.n_computed <= 1.4 * sum(8 + 23 for _ in requests)


def test_a_preempted_request_reuses_its_own_pages() -> None:
    engine = Engine(20, 4, max_num_seqs=2)
    engine.add(prompt(9), max_tokens=40)
    engine.add(prompt(9, first=3), max_tokens=40)
    engine.run_to_the_end()
    recomputed = engine.n_computed - 2 * (9 + 39)
    assert engine.scheduler.n_preemptions == 1
    assert 0 < recomputed < 40, "full pages stayed in the tree"


def test_abort_while_waiting_running_and_in_flight() -> None:
    engine = Engine(64, 4, max_num_seqs=1)
    running = engine.add(prompt(9), max_tokens=30)
    waiting = engine.add(prompt(9, first=2), max_tokens=30)
    engine.turn(2)
    engine.abort(waiting)
    n_available = engine.cache.n_available
    engine.abort(running)
    assert engine.cache.n_available == n_available, "a launched step still uses the pages"
    engine.run_to_the_end()


def test_a_leaked_lease_is_found_when_idle() -> None:
    engine = Engine()
    engine.serve(prompt(17), max_tokens=1)
    engine.cache.open(Namespace(), bytes(engine.requests["r0"].known_key))
    with pytest.raises(InvariantError, match="4 pages"):
        engine.scheduler.check()


def test_the_queue_is_not_ranked_again_while_no_request_can_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(24, 4, max_num_seqs=4)
    engine.add(prompt(40), max_tokens=50)
    engine.turn()
    for i in range(5):
        engine.add(prompt(60, first=2 + i), max_tokens=2)
    n_ranked = 0
    candidates = WaitingQueue.candidates

    def counted(queue: WaitingQueue) -> Iterable[Request]:
        nonlocal n_ranked
        n_ranked += 1
        return candidates(queue)

    monkeypatch.setattr(WaitingQueue, "candidates", counted)
    engine.turn(20)
    assert n_ranked < 10, "the number of available pages changes every fourth step at most"
    engine.run_to_the_end()


def test_running_requests_finish_after_a_flush_and_no_later_one_hits() -> None:
    engine = Engine()
    engine.add(prompt(40), max_tokens=20)
    engine.turn(2)
    _, n_leased = engine.cache.flush()
    assert n_leased == 10
    late = engine.add(prompt(40), max_tokens=2)
    engine.run_to_the_end()
    assert late.cache_use.counted.n_cached == 0


def test_without_sharing_every_prompt_is_computed() -> None:
    engine = Engine(shares=False)
    for _ in range(3):
        engine.add(prompt(17), max_tokens=2)
    engine.run_to_the_end()
    assert [request.cache_use.counted.n_cached for request in engine.requests.values()] == [0, 0, 0]
    assert engine.cache.n_free == engine.n_pages


@pytest.mark.parametrize(
    "bypass", [{"reads_cache": False}, {"n_prompt_logprobs": 1}], ids=["no cache", "prompt logprobs"]
)
def test_a_preempted_request_that_bypasses_the_cache_reuses_its_own_pages(bypass: dict[str, Any]) -> None:
    engine = Engine()
    request = engine.add(prompt(41), max_tokens=8, **bypass)
    while request.n_outputs < 2:
        engine.step()
    engine.scheduler.running.preempt(request, discards_results=False)
    engine.scheduler.running.release()
    assert engine.launch().rows[0].start == 40
    engine.run_to_the_end()
    assert request.cache_use.counted.n_cached == 0
