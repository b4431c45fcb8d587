"""``Match`` against what requests then find, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.intake import Intake
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.reporting.cache_commands import CacheCommands
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.settings.tenants import OPERATOR, TenantConfig
from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from radixkv.wire.namespace import CacheNamespace
from support.cases import examples
from support.engine import Engine, prompt, token_bytes
from support.fake_grammars import FakeCompiler
from support.loop_frontend import PROMPT, Frontend, done

PAGE_SIZE = 4
READY = wire.Ready(wire.WIRE_VERSION, 1000, 200, PAGE_SIZE, 64, 8, 64, "fake", "float32")


def commands(engine: Engine, tenants: Sequence[TenantConfig] = ()) -> CacheCommands:
    intake = Intake(
        READY,
        marks=engine.cache.tree.marks,
        tenants=tenants,
        eos_token_ids=frozenset(),
        seed=0,
        clock=lambda: engine.now,
    )
    return CacheCommands(
        intake,
        engine.scheduler,
        GrammarGate(FakeCompiler, 8),
        Adapters(),
        find_pin=engine.pins.find,
        others={},
        before_flush=engine.pins.clear,
    )


def match(engine: Engine, *prompts: Sequence[int], salt: str = "") -> cache_messages.Matched:
    reply = commands(engine).run(
        cache_messages.Match("m", tuple(token_bytes(one) for one in prompts), CacheNamespace(cache_salt=salt))
    )
    assert isinstance(reply, cache_messages.Matched), reply
    engine.check_invariants()
    return reply


def matched(front: Frontend, *prompts: Sequence[int], salt: str = "") -> cache_messages.Matched:
    reply = front.match(*prompts, salt=salt)
    assert isinstance(reply, cache_messages.Matched), reply
    return reply


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.sampled_from(["", "a"])), max_size=5),
    st.tuples(st.integers(1, 40), st.integers(1, 3), st.sampled_from(["", "a", "b"])),
)
def test_a_match_is_what_a_request_then_finds(
    earlier: list[tuple[int, int, str]], last: tuple[int, int, str]
) -> None:
    front = Frontend(n_pages=256)
    for index, (n_tokens, first, salt) in enumerate(earlier):
        front.serve(f"r{index}", prompt(n_tokens, first), salt=salt, max_tokens=2)
    n_tokens, first, salt = last
    (found,) = matched(front, prompt(n_tokens, first), salt=salt).prompts
    answer = done(front.serve("last", prompt(n_tokens, first), salt=salt, max_tokens=1))
    assert found.n_tokens == n_tokens
    assert found.n_on_device % PAGE_SIZE == 0
    assert answer.cache_use.n_cached - answer.cache_use.n_copied == min(found.n_on_device, n_tokens - 1)


def test_pages_that_are_still_being_computed_count_as_requests_share_them() -> None:
    front = Frontend()
    front.submit("a", PROMPT)
    front.turn()
    (found,) = matched(front, PROMPT).prompts
    assert found == cache_messages.TierMatch(11, 8, 0, 0)


def test_the_load_counts_running_and_waiting_requests_and_pages() -> None:
    front = Frontend(n_pages=64, max_num_seqs=1)
    assert matched(front, PROMPT) == cache_messages.Matched(
        "m", (cache_messages.TierMatch(11, 0, 0, 0),), 0, 0, 64, 0
    )
    front.submit("a", PROMPT)
    front.submit("b", range(30, 41))
    front.turn()
    load = matched(front, PROMPT)
    assert (load.n_running, load.n_waiting, load.n_pages_free + load.n_pages_evictable) == (1, 1, 61)
    front.run()
    stats, load = front.stats(), matched(front, PROMPT)
    assert (load.n_pages_free, load.n_pages_evictable) == (stats.n_pages_free, stats.n_pages_evictable)
    assert (load.n_running, load.n_waiting) == (0, 0)


def test_several_prompts_are_matched_alone_in_their_order() -> None:
    front = Frontend()
    front.serve("a", PROMPT, max_tokens=1)
    found = matched(front, [99, *PROMPT], PROMPT, PROMPT[:5]).prompts
    assert [one.n_on_device for one in found] == [0, 8, 4]


@pytest.mark.parametrize(
    ("prompts", "salt", "param"),
    [
        ([[]], "", "prompt"),
        ([[1], []], "", "prompt"),
        ([[1000]], "", "prompt"),
        ([[-1]], "", "prompt"),
        ([[1]], "x" * 129, "cache_salt"),
    ],
)
def test_invalid_tokens_and_salts_are_refused(prompts: list[list[int]], salt: str, param: str) -> None:
    reply = Frontend().match(*prompts, salt=salt)
    assert (reply.id, reply.code, reply.param) == ("m", "invalid_request", param)


@pytest.mark.parametrize("policy", ["lru", "lfuda", "adaptive"])
def test_matches_change_no_order_of_eviction(policy: str) -> None:
    """Two engines see the same requests; one of them is asked for the oldest prompt again and again."""
    evicted: list[list[list[int]]] = []
    for is_asked in (False, True):
        engine = Engine(200, PAGE_SIZE, n_slots=200, has_disk=True, eviction_policy=policy)  # type: ignore[arg-type]
        for first in range(1, 6):
            engine.serve(prompt(20, first), 2)
            if is_asked:
                for _ in range(3):
                    match(engine, prompt(20, 1), prompt(18, 2), prompt(7, 1), prompt(20, 90))
        versions = engine.cache.tree.version, engine.host.tree.version
        if is_asked:
            match(engine, prompt(20, 1))
            assert versions == (engine.cache.tree.version, engine.host.tree.version)
        trees = engine.cache.tree, engine.host.tree
        evicted.append([[page for run in tree.evict(200) for page in run.pages] for tree in trees])
        assert all(evicted[-1])
    assert evicted[0] == evicted[1]


def test_each_tier_counts_what_it_has_after_those_before_it() -> None:
    engine = Engine(64, PAGE_SIZE, n_slots=64, has_disk=True)
    engine.serve(prompt(40), 1)
    engine.turn(4)
    long = prompt(60)
    assert match(engine, long).prompts == (cache_messages.TierMatch(60, 40, 0, 0),)
    engine.cache.tree.check()
    engine.cache.invalidate(Namespace(), token_bytes(long[:24]))  # the device loses it all
    assert match(engine, long).prompts == (cache_messages.TierMatch(60, 0, 40, 0),)
    engine.serve(prompt(8), 1, uses_tiers=False)
    assert match(engine, long).prompts == (cache_messages.TierMatch(60, 8, 32, 0),)
    engine.host.flush()
    assert match(engine, long).prompts == (cache_messages.TierMatch(60, 8, 0, 32),)
    assert match(engine, long, salt="hers").prompts == (cache_messages.TierMatch(60, 0, 0, 0),)
    request = engine.serve(long, 1)
    use = request.cache_use.counted
    assert (use.n_cached, use.n_loaded, use.n_fetched) == (40, 32, 32)


def test_only_the_operator_is_told_the_length_that_all_tenants_requests_have_measured() -> None:
    tenants = (TenantConfig(OPERATOR, cache_salt="request"), TenantConfig("a"))
    engine = Engine(64, PAGE_SIZE, n_slots=64, load_policy="auto", tenants=tenants)
    replies = [
        commands(engine, tenants).run(cache_messages.Explain("e", token_bytes(prompt(9)), CacheNamespace(tenant)))
        for tenant in (OPERATOR, "a")
    ]
    of_operator, of_tenant = replies
    assert of_operator.min_loaded_tokens is not None
    assert of_tenant.min_loaded_tokens is None
