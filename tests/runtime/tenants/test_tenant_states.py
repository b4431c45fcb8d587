"""Shares of the slots of recurrent states: floors that others leave, and caps that are never passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from support.cases import examples
from support.engine import Engine, prompt

KEPT = TenantConfig("kept", min_page_share=0.5)


def make_engine(*tenants: TenantConfig, n_slots: int = 0) -> Engine:
    """Makes an engine with four states, and so many pages that none with a state is evicted."""
    return Engine(600, 4, tenants=tenants, n_states=4, n_slots=n_slots, max_num_batched_tokens=64)


def serve(engine: Engine, tenant: str, first: int) -> list[int]:
    tokens = [first, *prompt(10, first)]
    engine.serve(tokens, 1, namespace=Namespace(tenant), tenant=tenant)
    return tokens


def n_slots_of(engine: Engine, tenant: str) -> int:
    assert engine.cache.recurrent_states is not None
    return engine.cache.recurrent_states.n_slots_of(tenant)


def test_others_take_no_slot_of_a_tenants_floor() -> None:
    engine = make_engine(TenantConfig("flood"), KEPT)
    kept = [serve(engine, "kept", first) for first in range(1, 3)]
    for first in range(10, 14):
        serve(engine, "flood", first)
    assert [engine.n_cached(tokens, Namespace("kept")) for tokens in kept] == [8, 8]
    for first in range(20, 24):
        serve(engine, "kept", first)
    assert n_slots_of(engine, "flood") == 0, "what has no floor is evicted by use"
    serve(engine, "flood", 30)
    assert (n_slots_of(engine, "flood"), n_slots_of(engine, "kept")) == (1, 3), (
        "beyond its floor the tenant's are too"
    )
    engine.run_to_the_end()


def test_a_tenant_at_its_cap_evicts_its_own_states() -> None:
    engine = make_engine(TenantConfig("capped", max_page_share=0.25), TenantConfig("other"))
    first = serve(engine, "capped", 1)
    second = serve(engine, "capped", 2)
    assert n_slots_of(engine, "capped") == 1
    assert [engine.n_cached(tokens, Namespace("capped")) for tokens in (first, second)] == [0, 8]
    engine.run_to_the_end()


shares = st.sampled_from(((0.0, 1.0), (0.0, 0.5), (0.25, 0.5), (0.5, 1.0)))
arrival = st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 24), st.booleans())


@examples(8)
@given(
    shares=st.tuples(shares, shares),
    arrivals=st.lists(arrival, min_size=10, max_size=40),
    n_slots=st.sampled_from((0, 40)),
)
def test_any_arrivals_keep_floors_and_caps_of_states(
    shares: tuple[tuple[float, float], ...], arrivals: list[tuple[int, int, int, bool]], n_slots: int
) -> None:
    """An idle tenant loses no state below its floor, and nobody has more than its cap."""
    tenants = [
        TenantConfig(name, min_page_share=low, max_page_share=high)
        for name, (low, high) in zip("ab", shares, strict=True)
    ]
    engine = make_engine(*tenants, TenantConfig("c"), n_slots=n_slots)
    for tenant, first, n_prompt, waits in arrivals:
        name = "abc"[tenant]
        engine.add(prompt(n_prompt, first), 2, namespace=Namespace(name), tenant=name)
        before = {one.name: n_slots_of(engine, one.name) for one in tenants}
        engine.turn(8 if waits else 1)
        busy = {one.sender for key, one in engine.requests.items() if key not in engine.ended}
        busy |= {one.sender for one in engine.scheduler.running.releasing} | {name}
        for one in tenants:
            now = n_slots_of(engine, one.name)
            assert now <= one.max_page_share * 4
            if one.name not in busy and not engine.scheduler.tiers.is_busy:
                assert now >= min(before[one.name], int(one.min_page_share * 4))
    engine.run_to_the_end()
