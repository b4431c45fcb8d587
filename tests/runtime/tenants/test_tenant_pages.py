"""Shares of pages: floors that others leave, caps that are never passed, and nobody who waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.tenants.tenant_pages import check_longest_request
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from support.cases import examples, rest_nightly
from support.engine import Engine, prompt, token_bytes

N_PAGES = 64
FLOOD, KEPT = TenantConfig("flood"), TenantConfig("kept", min_page_share=0.5)


def make_engine(*tenants: TenantConfig, n_pages: int = N_PAGES, **options: object) -> Engine:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_queued_requests": 1000}
    return Engine(n_pages, 4, tenants=tenants, **(defaults | options))


def add(engine: Engine, tenant: str, n_prompt: int = 8, max_tokens: int = 4, first: int | None = None) -> Request:
    first = len(engine.requests) if first is None else first
    return engine.add([first, *prompt(n_prompt - 1, first)], max_tokens, namespace=Namespace(tenant), tenant=tenant)


def n_cached(engine: Engine, tenant: str, n_prompt: int, first: int) -> int:
    tokens = token_bytes([first, *prompt(n_prompt - 1, first)])
    return engine.cache.tree.match(Namespace(tenant), tokens)


def flood(engine: Engine, n_requests: int = 30, n_prompt: int = 16, tenant: str = "flood") -> None:
    for _ in range(n_requests):
        add(engine, tenant, n_prompt, max_tokens=8)


@pytest.mark.parametrize("policy", rest_nightly(["lru", "lfuda", "adaptive"], kept=(1,)))
def test_others_evict_no_page_below_the_floor(policy: str) -> None:
    engine = make_engine(FLOOD, KEPT, eviction_policy=policy)
    for first in range(2):
        add(engine, "kept", n_prompt=48, max_tokens=1, first=first)
        engine.run()
    before = engine.cache.page_quotas.n_owned["kept"]
    flood(engine, tenant="flood")
    engine.run()
    assert engine.cache.page_quotas.n_owned["kept"] == before == 24
    assert [n_cached(engine, "kept", 48, first) for first in range(2)] == [48, 48]
    flood(engine, tenant="kept")
    engine.run_to_the_end()


def test_a_copy_that_needs_no_page_has_room_while_others_lack_reserved_ones() -> None:
    """A lease takes pages that could be evicted for a floor."""
    engine, namespace = make_engine(FLOOD, KEPT), Namespace("flood")
    add(engine, "flood", n_prompt=96, max_tokens=1, first=0)
    engine.run()
    cache = engine.cache
    private = cache.open(namespace, token_bytes(prompt(8, 9)))
    assert cache.reserve(private, 32)
    found = cache.open(namespace, token_bytes([0, *prompt(95, 0)]))
    assert cache.n_available_to(namespace) < 0 < found.n_leased
    assert cache.reserve_copied(found, found.n_leased)
    assert not cache.reserve_copied(found, found.n_leased + 1)
    for blocks in (found, private):
        cache.close(blocks)
    engine.check_idle()


def test_beyond_its_floor_a_tenants_pages_are_evicted_as_all_others() -> None:
    engine = make_engine(FLOOD, KEPT)
    for first in range(5):
        add(engine, "kept", n_prompt=40, max_tokens=1, first=first)
        engine.run()
    flood(engine)
    engine.run()
    assert engine.cache.page_quotas.n_owned["kept"] == 32
    assert n_cached(engine, "kept", 40, 4) == 40, "the least recently used went first"
    assert n_cached(engine, "kept", 40, 0) < 40


def test_the_pages_of_the_floor_are_there_for_its_tenants_requests() -> None:
    """Though the flood's answers grow until they fill all pages that they may."""
    engine = make_engine(FLOOD, KEPT)
    for _ in range(12):
        add(engine, "flood", n_prompt=8, max_tokens=100)
    engine.turn(30)
    requests = [add(engine, "kept", n_prompt=40, max_tokens=20) for _ in range(2)]
    for request in requests:
        assert engine.turns_until_started(request) <= 2
    while any(request.phase is not Phase.FINISHED for request in requests):
        engine.turn()
        assert not any(request.phase is Phase.WAITING for request in requests), "it was preempted"
    assert engine.scheduler.n_preemptions
    engine.run_to_the_end()


def test_a_tenant_at_its_cap_evicts_its_own_pages_and_preempts_its_own_requests() -> None:
    engine = make_engine(TenantConfig("flood", max_page_share=0.25), TenantConfig("other"))
    add(engine, "other", n_prompt=48, max_tokens=1, first=0)
    engine.run()
    others = [add(engine, "other", n_prompt=8, max_tokens=40)]
    flood(engine, 12)
    while engine.scheduler.waiting or len(engine.scheduler.running) > 1:
        engine.turn()
        assert engine.cache.page_quotas.n_owned["flood"] <= 16
        assert not any(request.phase is Phase.WAITING and request.first_row is not None for request in others)
        if others[-1].phase is Phase.FINISHED:
            others.append(add(engine, "other", n_prompt=8, max_tokens=40))
            assert engine.turns_until_started(others[-1]) <= 2, "the flood does not block the queue"
    assert n_cached(engine, "other", 48, 0) == 48
    engine.run_to_the_end()


@pytest.mark.nightly
@pytest.mark.parametrize("is_in_failed_step", [False, True])
def test_the_floor_is_there_while_requests_of_a_failed_step_wait_for_pages(is_in_failed_step: bool) -> None:
    """Requests that are tried again alone hold back others, but not from what is reserved for them."""
    engine = make_engine(FLOOD, KEPT, TenantConfig("other"))
    for _ in range(8):
        add(engine, "flood", n_prompt=8, max_tokens=100)
    while engine.cache.n_available_to(Namespace("flood")):
        engine.turn()
    kept = [add(engine, "kept", n_prompt=40, max_tokens=20)] if is_in_failed_step else []
    engine.turn()
    engine.device.fail_steps = {engine.pending[0][0].step}
    engine.turn(56)
    assert any(one.recovery.is_retried and one.sender == "flood" for one in engine.scheduler.waiting)
    assert not any(one.recovery.is_retried or one.phase is Phase.WAITING for one in kept)
    other, kept = add(engine, "other"), [add(engine, "kept", n_prompt=32, max_tokens=20) for _ in range(2)]
    for request in kept:
        assert engine.turns_until_started(request) <= 4
    assert other.phase is Phase.WAITING
    engine.run_to_the_end()


@pytest.mark.parametrize("n_turns", [1, 2])
def test_a_request_of_a_failed_step_that_waits_for_its_tenants_row_holds_back_nobody_else(n_turns: int) -> None:
    """It lost its only row to another one of its tenant, in one of the two cases."""
    engine = make_engine(TenantConfig("capped", max_row_share=1 / 16), TenantConfig("other"))
    add(engine, "capped", max_tokens=8)
    add(engine, "capped", max_tokens=60)
    engine.turn(n_turns)
    engine.device.fail_steps = {engine.pending[0][0].step}
    for _ in range(8):
        engine.turn()
        assert engine.turns_until_started(add(engine, "other", max_tokens=2)) <= 4
    engine.run_to_the_end()


def test_requests_of_a_failed_step_do_not_wait_for_each_other_for_ever() -> None:
    """The first lost its tenant's only row to another of its tenant; the second could start at any time."""
    engine = make_engine(TenantConfig("capped", max_row_share=1 / 16), TenantConfig("other"))
    retried = [add(engine, tenant, max_tokens=2) for tenant in ("capped", "other")]
    add(engine, "capped", max_tokens=2)
    engine.device.refuse_launches = 1
    engine.turn()
    assert all(request.recovery.is_retried for request in retried)
    engine.run_to_the_end("length")


def test_all_pages_of_the_floor_are_there_beside_a_full_pool() -> None:
    engine = make_engine(FLOOD, TenantConfig("kept", min_page_share=0.25))
    for _ in range(12):
        add(engine, "flood", n_prompt=8, max_tokens=100)
    while engine.cache.n_available_to(Namespace("flood")):
        engine.turn()
    request = add(engine, "kept", n_prompt=60, max_tokens=4)
    assert engine.turns_until_started(request) <= 2
    assert engine.scheduler.running
    engine.run_to_the_end()


@pytest.mark.parametrize(
    "tenants",
    [(FLOOD, KEPT), (TenantConfig("flood", max_page_share=0.5), TenantConfig("kept"))],
    ids=["a floor", "a cap"],
)
def test_nobody_is_preempted_whose_pages_are_of_no_use(tenants: tuple[TenantConfig, ...]) -> None:
    """Though the tenant has more rows than the flood that needs pages."""
    engine = make_engine(*tenants)
    kept = [add(engine, "kept", n_prompt=8, max_tokens=20) for _ in range(4)]
    engine.turn()
    for _ in range(2):
        add(engine, "flood", n_prompt=56, max_tokens=40)
    while not all(request.phase is Phase.FINISHED for request in kept):
        engine.turn()
        assert not any(request.phase is Phase.WAITING for request in kept)
    assert engine.scheduler.n_preemptions
    engine.run_to_the_end()


def test_a_tenant_at_its_cap_does_not_block_the_queue_when_it_is_its_turn() -> None:
    engine = make_engine(TenantConfig("capped", max_page_share=0.25), TenantConfig("other"))
    add(engine, "capped", n_prompt=44, max_tokens=18)
    engine.turn()
    waiting = add(engine, "capped", n_prompt=44, max_tokens=4)
    for _ in range(4):
        assert engine.turns_until_started(add(engine, "other", n_prompt=60, max_tokens=1)) <= 2
    assert waiting.phase is Phase.WAITING
    engine.run_to_the_end()


def test_pages_are_kept_for_the_request_whose_turn_it_is() -> None:
    """Small requests of another tenant would take each page that becomes free."""
    engine = make_engine(FLOOD, TenantConfig("large"), TenantConfig("kept", min_page_share=0.1))
    flood(engine, 200, n_prompt=12)
    engine.turn(8)
    large = add(engine, "large", n_prompt=200, max_tokens=4)
    engine.turn()
    small = add(engine, "kept", n_prompt=12, max_tokens=4)
    assert engine.turns_until_started(small) <= 2, "it has pages of its own"
    assert large.phase is Phase.WAITING
    assert engine.turns_until_started(large) <= 12
    assert len(engine.scheduler.waiting) > 50


def test_a_request_that_needs_all_that_its_tenant_may_have_is_served() -> None:
    engine = make_engine(FLOOD, KEPT, TenantConfig("capped", max_page_share=0.25))
    flood(engine, 10)
    engine.run()
    for first in range(4):
        add(engine, "kept", n_prompt=32, max_tokens=1, first=100 + first)
    engine.run()
    for tenant, n_pages in (("flood", 32), ("kept", 64), ("capped", 16)):
        for beside in ("flood", "kept", "capped"):
            add(engine, beside, n_prompt=12, max_tokens=30)
        add(engine, tenant, n_prompt=4 * n_pages - 20, max_tokens=21)
        engine.run_to_the_end("length")


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([TenantConfig("a", max_page_share=0.3)], "tenant 'a' may have 30 of the 100 pages, and the longest"),
        (
            [FLOOD, TenantConfig("b", min_page_share=0.7)],
            "tenant 'flood' may have 30 .*max_model_len to 480 or less",
        ),
        (
            [KEPT, TenantConfig("c", min_page_share=0.5), TenantConfig("", cache_salt="request")],
            "the operator may have 0 .* lower the min_page_share of others$",
        ),
    ],
)
def test_shares_with_which_a_tenant_could_not_be_served_are_refused(
    tenants: Sequence[TenantConfig], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_longest_request(tenants, n_pages=100, n_longest=40, page_size=16)
    check_longest_request([KEPT, TenantConfig("c", min_page_share=0.5)], 100, 50, 16)


@pytest.mark.parametrize("n_choices", [1, 3])
def test_floors_hold_in_the_host_tier_too(n_choices: int) -> None:
    engine = make_engine(FLOOD, KEPT, n_slots=48)
    tokens = [7, *prompt(47, 7)]
    engine.serve(tokens, 2, namespace=Namespace("kept"), tenant="kept", n=n_choices)
    engine.finish_copies()
    flood(engine, 40)
    engine.run()
    assert engine.host.n_evicted > 0
    assert engine.host.page_quotas.n_owned["kept"] >= 12
    assert engine.host.tree.match(Namespace("kept"), token_bytes(tokens)) == 48
    engine.run_to_the_end()


shares = st.sampled_from(((0.0, 1.0), (0.0, 0.5), (0.25, 0.5), (0.25, 1.0), (0.4, 0.6)))
request = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))


@examples(8)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 8), st.lists(request, max_size=5)), min_size=5, max_size=25),
    shares=st.tuples(shares, shares),
    policy=st.sampled_from(("lru", "adaptive")),
    n_slots=st.sampled_from((0, 40)),
)
def test_any_arrivals_keep_floors_and_caps(
    arrivals: list[tuple[int, list[tuple[int, int, int, int]]]],
    shares: tuple[tuple[float, float], ...],
    policy: str,
    n_slots: int,
) -> None:
    """A tenant that is idle loses no page below its floor, nobody owns more than the cap, and all are served."""
    tenants = [
        TenantConfig(name, min_page_share=low, max_page_share=high)
        for name, (low, high) in zip("ab", shares, strict=True)
    ]
    engine = make_engine(*tenants, TenantConfig("c"), n_pages=60, eviction_policy=policy, n_slots=n_slots)
    tiers = (engine.cache, engine.host) if n_slots else (engine.cache,)
    for n_turns, requests in [*arrivals, (150, [])]:
        for tenant, n_prompt, max_tokens, first in requests:
            n_prompt = min(n_prompt, 4 * 12 - max_tokens)  # the floors of others leave at least 12 pages
            add(engine, "abc"[tenant], n_prompt, max_tokens, first)
        for _ in range(n_turns):
            busy = {one.sender for name, one in engine.requests.items() if name not in engine.ended}
            busy |= {one.sender for one in engine.scheduler.running.releasing}
            before = [dict(tier.page_quotas.n_owned) for tier in tiers]
            engine.turn()
            for tier, n_owned in zip(tiers, before, strict=True):
                for one in tenants:
                    now = tier.page_quotas.n_owned.get(one.name, 0)
                    assert now <= one.max_page_share * tier.n_pages
                    if one.name not in busy and one.has_page_share and not engine.scheduler.tiers.is_busy:
                        assert now >= min(n_owned[one.name], int(one.min_page_share * tier.n_pages))
    engine.run_to_the_end()
