"""``GetStored`` against what the tiers have once everything that was offered has been copied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire.namespace import CacheNamespace
from runtime.reporting.test_cache_match import commands
from support.cases import examples
from support.engine import Engine, prompt, token_bytes

PAGE_SIZE = 4
MODELS: dict[str, dict[str, Any]] = {
    "pages": {},
    "states": {"n_states": 16, "state_block_tokens": PAGE_SIZE},
    "windows": {"mixed_window": 8, "state_block_tokens": PAGE_SIZE},
}
ACTIONS = st.tuples(st.sampled_from(["copy", "failed copy", "write", "half a write", "turn"]), st.integers(0, 3))


def stored(engine: Engine, n_tokens: int, salt: str = "") -> tuple[int, int, bool]:
    """Returns how many tokens of the prompt host tier and disk tier have, and whether they will get more."""
    reply = commands(engine).run(
        cache_messages.GetStored("s", token_bytes(prompt(n_tokens)), CacheNamespace(cache_salt=salt))
    )
    assert isinstance(reply, cache_messages.Stored), reply
    engine.check_invariants()
    return reply.n_in_host, reply.n_on_disk, reply.is_storing


def act(engine: Engine, action: str, which: int) -> None:
    if action == "turn":
        engine.scheduler.schedule()
    elif "copy" in action:
        engine.copier.finish(which, fails=action == "failed copy")
    elif action == "write":
        engine.store.finish(which)
    else:
        engine.store.finish(which, n_pages=1)


def serve(engine: Engine, n_tokens: int) -> None:
    """Computes the prompt, and finishes no copy."""
    engine.add(prompt(n_tokens), max_tokens=1)
    for _ in range(40):
        if engine.scheduler.is_idle:
            break
        engine.turn()
    assert engine.scheduler.is_idle


@examples(60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    n_tokens=st.integers(1, 50),
    n_slots=st.sampled_from([6, 64]),
    has_disk=st.booleans(),
    actions=st.lists(ACTIONS, max_size=30),
)
def test_what_is_not_being_stored_is_not_stored_later(
    name: str, n_tokens: int, n_slots: int, has_disk: bool, actions: list[tuple[str, int]]
) -> None:
    engine = Engine(
        64,
        PAGE_SIZE,
        n_slots=n_slots,
        has_disk=has_disk,
        finishes_copies=False,
        max_num_batched_tokens=16,
        **MODELS[name],
    )
    serve(engine, n_tokens)
    for action, which in actions:
        n_in_host, n_on_disk, is_storing = stored(engine, n_tokens)
        if not is_storing:
            break
        act(engine, action, which)
    n_in_host, n_on_disk, is_storing = stored(engine, n_tokens)
    engine.store_all()
    at_the_end = stored(engine, n_tokens)
    assert not at_the_end[2]
    assert at_the_end[0] >= n_in_host
    assert at_the_end[1] >= n_on_disk
    if not is_storing:
        assert at_the_end[:2] == (n_in_host, n_on_disk)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_stored_as_far_as_it_is_of_use(name: str) -> None:
    engine = Engine(64, PAGE_SIZE, n_slots=64, has_disk=True, finishes_copies=False, **MODELS[name])
    serve(engine, 30)
    assert stored(engine, 30) == (0, 0, True)
    assert stored(engine, 30, salt="hers") == (0, 0, False)
    engine.store_all()
    n_of_use = engine.n_cached(prompt(30))
    assert 16 < n_of_use < 30
    assert stored(engine, 30) == (n_of_use, n_of_use, False)
    engine.invalidate(Namespace(), token_bytes(prompt(4)))
    assert stored(engine, 30) == (0, 0, False)


def test_a_prompt_waits_for_a_host_tier_whose_memory_is_being_prepared() -> None:
    engine = Engine(64, PAGE_SIZE, n_slots=64, finishes_copies=False)
    engine.copier.n_ready, engine.copier.is_growing = 0, True
    serve(engine, 30)
    assert stored(engine, 30) == (0, 0, True)
    engine.copier.n_ready, engine.copier.is_growing = None, False
    engine.store_all()
    assert stored(engine, 30) == (28, 0, False)


class _Read(bytes):
    """Tokens of an offer, which count the bytes that they are compared with."""

    n_compared = 0

    def startswith(self, prefix: Any, *place: Any) -> bool:
        _Read.n_compared += len(prefix)
        return super().startswith(prefix, *place)


def test_offers_that_leave_a_prompt_late_are_told_from_it_by_a_page() -> None:
    """A question is asked again and again while its prompt is copied, and thousands may share a long prefix."""
    engine, common, n_offers = Engine(64, PAGE_SIZE, n_slots=64), prompt(400), 50
    for number in range(n_offers):
        engine.host_tier.offer(Namespace(), _Read(token_bytes([*common, *[1000 + number] * PAGE_SIZE])))
    others = [[*common, *[999] * PAGE_SIZE], [7, *common[1:], *[1000] * PAGE_SIZE], common]
    _Read.n_compared = 0
    for tokens in others:
        assert not engine.host_tier.is_storing(Namespace(), token_bytes(tokens), 400)
    n_longest = 401 * 4 * PAGE_SIZE
    assert _Read.n_compared <= 2 * n_offers * 4 * PAGE_SIZE + n_longest
    assert engine.host_tier.is_storing(Namespace(), token_bytes([*common, *[1049] * PAGE_SIZE]), 400)
    assert not engine.host_tier.is_storing(Namespace("hers"), token_bytes([*common, *[1049] * PAGE_SIZE]), 400)
