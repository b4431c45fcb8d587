"""Tenants in the queue: tokens in proportion to weights, a bound on waiting, and shares of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError, QueueFull
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tenants.fair_queue import QUANTUM_TOKENS, FairQueue
from radixkv.settings.checks import MIN_PRIORITY
from radixkv.settings.tenants import TenantConfig, check_rows
from radixkv.tree.node import Namespace
from support.cases import covering, examples, rest_nightly
from support.engine import Engine, prompt

N_ROWS = 4


def make_engine(tenants: Sequence[TenantConfig], n_pages: int = 400, **settings: object) -> Engine:
    defaults = {"max_num_seqs": N_ROWS, "max_num_batched_tokens": 32, "max_queued_requests": 1000}
    return Engine(n_pages, 4, tenants=tenants, **(defaults | settings))


def add(engine: Engine, tenant: str, n_prompt: int = 8, max_tokens: int = 4, **options: Any) -> Request:
    first = len(engine.requests)
    tokens = [first, *prompt(n_prompt - 1, first)]
    return engine.add(tokens, max_tokens, namespace=Namespace(tenant), tenant=tenant, **options)


@pytest.mark.parametrize(("policy", "urgent", "weight"), covering(["lpm", "fcfs"], [False, True], [1, 1000]))
def test_one_request_does_not_wait_behind_another_tenants_flood(policy: str, urgent: bool, weight: float) -> None:
    """Weights are proportions: it makes no difference if all are a thousand times as large."""
    engine = make_engine([TenantConfig("flood", weight), TenantConfig("one", weight)], schedule_policy=policy)
    for _ in range(60):
        add(engine, "flood", priority=MIN_PRIORITY if urgent else 0)
    engine.turn(10)
    waits = [engine.turns_until_started(add(engine, "one")) for _ in range(4)]
    assert len(engine.scheduler.waiting) > 10
    assert max(waits) <= 6, "at most until a row is free: an answer has four tokens"


@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "weight"), covering([(8, 4), (6, 12), (200, 2)], [3, 1]))
def test_tenants_that_wait_get_tokens_by_their_weights(weight: int, sizes: tuple[int, int]) -> None:
    """Whatever the sizes of their requests are: those of the other tenant have 12 tokens."""
    n_prompt, max_tokens = sizes
    engine = make_engine([TenantConfig("a", weight), TenantConfig("b")])
    queue = engine.scheduler.waiting
    n_computed = queue.n_computed
    while sum(n_computed.values()) < 1500:
        while queue.n_waiting("a") < 8:
            add(engine, "a", n_prompt, max_tokens)
        while queue.n_waiting("b") < 8:
            add(engine, "b")
        engine.turn()
    assert n_computed["a"] / n_computed["b"] == pytest.approx(weight, rel=0.25)


@pytest.mark.parametrize("weight", rest_nightly([0.001, 0.2, 0.3, 1.0], kept=(0, 3)))
def test_no_step_is_empty_while_a_request_could_run(weight: float) -> None:
    """Whatever the tenant owes: here it is a fraction that sums of floats may miss."""
    engine = make_engine([TenantConfig("a", weight), TenantConfig("b")], max_num_seqs=1)
    for n_prompt in range(1, 80):
        add(engine, "a", n_prompt, max_tokens=1)
    engine.run_to_the_end()


def fill(engine: Engine, *tenants: str, n: int = 8) -> FairQueue:
    """Adds requests until so many of each tenant wait."""
    queue = engine.scheduler.waiting
    for tenant in tenants:
        while queue.n_waiting(tenant) < n:
            add(engine, tenant)
    return queue


def owe(engine: Engine) -> None:
    """Lets four long answers of "early" run while a request of "late" waits."""
    for _ in range(N_ROWS):
        add(engine, "early", max_tokens=60)
    engine.turn()
    fill(engine, "late", n=1)
    engine.turn(50)


def test_what_a_tenant_used_is_forgotten_once_nobody_waits() -> None:
    engine = make_engine([TenantConfig("early"), TenantConfig("late")])
    owe(engine)
    engine.run()
    queue = fill(engine, "early", "late")
    before = Counter(queue.n_computed)
    while queue.n_computed["late"] - before["late"] < 100:
        engine.turn()
        fill(engine, "early", "late")
    assert queue.n_computed["early"] - before["early"] > 60


def test_what_a_tenant_used_is_paid_back_while_others_are_served() -> None:
    engine = make_engine([TenantConfig("early"), TenantConfig("late")])
    owe(engine)
    queue = fill(engine, "late")
    before = Counter(queue.n_computed)
    while queue.n_computed["late"] - before["late"] < 500:
        engine.turn()
        fill(engine, "late")
    assert engine.turns_until_started(add(engine, "early")) <= 6


def test_short_prompts_overtake_anothers_long_one_only_in_their_own_turns() -> None:
    engine = make_engine([TenantConfig("long", 9), TenantConfig("short")], n_pages=1000)
    queue = fill(engine, "short", n=1)
    while sum(queue.n_computed.values()) < 1500:
        if not queue.n_waiting("long"):
            add(engine, "long", n_prompt=600, max_tokens=1)
        while queue.n_waiting("short") < 8:
            add(engine, "short", n_prompt=4, max_tokens=1)
        engine.turn()
    assert queue.n_computed["long"] / queue.n_computed["short"] == pytest.approx(9, rel=0.25)


@pytest.mark.parametrize("budget", [8, 32])
@pytest.mark.parametrize("weight", [3, 9])
def test_a_tenant_with_nothing_but_a_running_prompt_has_its_share(budget: int, weight: int) -> None:
    tenants = [TenantConfig("long", weight), TenantConfig("short")]
    engine = make_engine(tenants, n_pages=1000, max_num_batched_tokens=budget, max_num_seqs=16)
    queue = engine.scheduler.waiting
    add(engine, "long", n_prompt=1000, max_tokens=1)
    while queue.n_computed["long"] < 600:
        while queue.n_waiting("short") < 8:
            add(engine, "short", n_prompt=4, max_tokens=1)
        engine.turn()
    assert queue.n_computed["long"] / queue.n_computed["short"] == pytest.approx(weight, rel=0.2)


def test_a_short_prompt_overtakes_another_tenants_long_one() -> None:
    engine = make_engine([TenantConfig("long"), TenantConfig("short")])
    for _ in range(3):
        add(engine, "long", n_prompt=300, priority=-1)
    engine.turn()
    assert engine.turns_until_started(add(engine, "short")) <= 2
    engine.run_to_the_end()


@pytest.mark.parametrize("n_tenants", [20, 60])
def test_all_tenants_together_rank_no_more_requests_than_one(
    n_tenants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each tenant has 8 requests, none of which can overtake the long prompt."""
    names = [f"t{number}" for number in range(n_tenants)]
    engine = make_engine([TenantConfig(name) for name in ("long", *names)], n_pages=2000, lpm_window=80)
    add(engine, "long", n_prompt=600)
    engine.turn()
    for name in names * 8:
        add(engine, name, n_prompt=400)
    n_ranked = [0]
    matches = engine.cache.matches

    def counted(prompts: Iterable[tuple[Namespace, bytes]]) -> list[int]:
        found = matches(prompts)
        n_ranked[-1] += len(found)
        return found

    monkeypatch.setattr(engine.cache, "matches", counted)
    for _ in range(12):
        engine.turn()
        n_ranked.append(0)
    assert 40 <= max(n_ranked) <= 80


def test_a_full_queue_is_its_tenants_own() -> None:
    engine = make_engine([TenantConfig("flood"), TenantConfig("one")], max_queued_requests=3)
    for _ in range(3):
        add(engine, "flood")
    with pytest.raises(QueueFull):
        add(engine, "flood")
    add(engine, "one")
    engine.run_to_the_end()


def test_requests_of_all_tenants_time_out_in_the_order_of_their_arrival() -> None:
    engine = make_engine([TenantConfig("a"), TenantConfig("b")], queue_timeout_s=5.0)
    requests = []
    for tenant in ("b", "a", "b"):
        requests.append(add(engine, tenant))
        engine.now += 1.0
    engine.now += 3.5
    engine.expire()
    assert list(engine.ended) == [request.id for request in requests[:2]]
    engine.run_to_the_end()


def test_the_floor_of_rows_is_kept_free_of_others() -> None:
    engine = make_engine([TenantConfig("flood"), TenantConfig("sure", min_row_share=0.5)])
    for _ in range(20):
        add(engine, "flood")
    for _ in range(10):
        engine.turn()
        assert len(engine.scheduler.running) <= 2
    for _ in range(2):
        assert engine.turns_until_started(add(engine, "sure", max_tokens=30)) <= 1
    engine.run_to_the_end()


def test_the_cap_of_rows_leaves_rows_to_others() -> None:
    engine = make_engine([TenantConfig("flood", max_row_share=0.5), TenantConfig("one")])
    for _ in range(8):
        add(engine, "flood", max_tokens=30)
    for _ in range(10):
        engine.turn()
        assert engine.scheduler.shares.rows.n_rows("flood") <= 2
    assert engine.turns_until_started(add(engine, "one", max_tokens=30)) <= 1
    assert engine.turns_until_started(add(engine, "one", max_tokens=30)) <= 1
    engine.run_to_the_end()


def test_forks_count_as_rows() -> None:
    engine = make_engine([TenantConfig("a", max_row_share=0.5), TenantConfig("b")])
    add(engine, "a", max_tokens=12, n=4)
    for _ in range(8):
        engine.turn()
        assert engine.scheduler.shares.rows.n_rows("a") <= 2
    assert engine.turns_until_started(add(engine, "b")) <= 1
    engine.run_to_the_end()


def test_beams_that_have_not_enough_rows_end_beside_another_tenants_flood() -> None:
    """Beams that wait for the others of their group give way to them, though steps are never empty."""
    engine = make_engine([TenantConfig("beams", max_row_share=0.5), TenantConfig("flood")])
    fill(engine, "flood")
    search = add(engine, "beams", max_tokens=6, n=4, is_beam_search=True)
    for _ in range(100):
        engine.turn()
        fill(engine, "flood")
        assert engine.scheduler.shares.rows.n_rows("beams") <= 2
    assert search.phase is Phase.FINISHED
    engine.run_to_the_end()


@pytest.mark.parametrize(("share", "n_rows"), [(0.5, 2), (0.01, 1), (0.75, 3), (1.0, 4)])
def test_a_cap_is_at_least_one_row(share: float, n_rows: int) -> None:
    engine = make_engine([TenantConfig("a", max_row_share=share)])
    for _ in range(8):
        add(engine, "a", max_tokens=9)
    engine.turn(6)
    assert engine.scheduler.shares.rows.n_rows("a") == n_rows


def test_floors_that_leave_a_tenant_no_row_are_refused() -> None:
    tenants = [TenantConfig("a", min_row_share=0.5), TenantConfig("b", min_row_share=0.5), TenantConfig("c")]
    with pytest.raises(ConfigError, match="leave tenant 'c' none of the 4 rows of a step"):
        check_rows(tenants, 4)
    with pytest.raises(ConfigError, match=r"tenant 'd': min_row_share 0\.2 is less than one of the 4 rows"):
        check_rows([TenantConfig("d", min_row_share=0.2)], 4)
    check_rows(tenants, 5)
    check_rows(tenants[:2], 4)
    with pytest.raises(ConfigError, match="leave the operator none"):
        check_rows([*tenants[:2], TenantConfig("", cache_salt="request")], 4)


def test_a_tenants_many_rows_are_preempted_before_anothers_only_one() -> None:
    engine = make_engine([TenantConfig("flood"), TenantConfig("one")], n_pages=24)
    for _ in range(6):
        add(engine, "flood", n_prompt=16, max_tokens=40, priority=-5)
    engine.turn()
    one = add(engine, "one", n_prompt=12, max_tokens=40)
    engine.turns_until_started(one)
    n_before = engine.scheduler.n_preemptions
    while one.phase is Phase.RUNNING:
        engine.turn()
    assert engine.scheduler.n_preemptions > n_before
    assert one.phase is Phase.FINISHED or len(engine.scheduler.running) == 1, (
        "it is younger than the only other one"
    )
    engine.run_to_the_end()


request = st.tuples(st.sampled_from("aab"), st.integers(1, 40), st.integers(1, 8), st.integers(-1, 1))


@examples(10)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.lists(request, max_size=6)), min_size=5, max_size=25),
    weights=st.tuples(st.sampled_from((0.5, 1, 2)), st.sampled_from((1, 2))),
    cap=st.sampled_from((0.5, 1.0)),
    floor=st.sampled_from((0.0, 0.25, 0.5)),
    policy=st.sampled_from(("lpm", "fcfs")),
)
def test_any_arrivals_are_served_by_weights_floors_and_caps(
    arrivals: list[tuple[int, list[tuple[str, int, int, int]]]],
    weights: tuple[float, float],
    cap: float,
    floor: float,
    policy: str,
) -> None:
    """While two tenants wait and may have rows, neither gets more tokens by its weight than the other, but for the
    quantum of a round and what the requests cost that have rows."""
    max_cost = 40 + 8
    tenants = [
        TenantConfig("a", weights[0], max_row_share=cap),
        TenantConfig("b", weights[1], min_row_share=floor),
    ]
    engine = make_engine(tenants, n_pages=800, schedule_policy=policy)
    queue, rows = engine.scheduler.waiting, engine.scheduler.shares.rows
    begun: Counter[str] | None = None
    for n_turns, requests in [*arrivals, (30, [])]:
        for tenant, n_prompt, max_tokens, priority in requests:
            add(engine, tenant, n_prompt, max_tokens, priority=priority)
        for _ in range(n_turns):
            engine.turn()
            assert rows.n_rows("a") <= max(1, cap * N_ROWS)
            assert rows.n_rows("a") <= N_ROWS - floor * N_ROWS
            assert rows.n_rows("b") <= N_ROWS
            active = [*engine.scheduler.running, *engine.scheduler.running.releasing]
            assert Counter(request.sender for request in active) == {
                name: rows.n_rows(name) for name in "ab" if rows.n_rows(name)
            }
            if not all(queue.n_waiting(name) and rows.n_rows(name) < N_ROWS * cap for name in "ab"):
                begun = None
                continue
            begun = Counter(queue.n_computed) if begun is None else begun
            served = [
                (queue.n_computed[name] - begun[name]) / weight for name, weight in zip("ab", weights, strict=True)
            ]
            bound = sum((QUANTUM_TOKENS * weight + N_ROWS * max_cost) / weight for weight in weights)
            assert abs(served[0] - served[1]) <= bound
    engine.run_to_the_end()
