"""Pins of a running engine: by request, by message, and in the host tier."""

from __future__ import annotations

import pytest

from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from support.engine import Engine, prompt, token_bytes
from support.loop_frontend import PROMPT, Frontend

PAGE_SIZE = 4


def fill(front: Frontend, name: str) -> None:
    """Serves a prompt that is as long as the pool."""
    front.serve(name, range(100, 190), max_tokens=1)


def test_the_prompt_of_a_request_is_pinned_when_it_ends() -> None:
    front = Frontend(n_pages=24)
    front.submit("a", PROMPT, pins=[wire.PromptPin(len(PROMPT), 60.0)], max_tokens=6)
    front.turn()
    assert front.explain(PROMPT).n_pinned == 0
    front.run()
    reply = front.explain(PROMPT)
    assert (reply.n_pinned, reply.pin_seconds_left) == (8, 60.0)
    assert front.stats().n_pages_pinned == 2
    fill(front, "b")
    assert front.explain(PROMPT).n_cached == 4, "only the last page was needed"
    assert front.explain(PROMPT).n_pinned == 4
    front.now = 60.0
    front.turn()
    assert (front.explain(PROMPT).n_pinned, front.stats().n_pages_pinned) == (0, 0)


def test_a_prompt_knows_its_own_pin() -> None:
    """Also one whose pages are all pinned by a longer prompt, but not one that has a pinned beginning."""
    front = Frontend(n_pages=24)
    longer, longest = [*PROMPT, *range(200, 205)], [*PROMPT, *range(200, 220)]
    front.serve("a", longest)
    assert not front.explain(longer).has_own_pin
    front.submit("b", longer, pins=[wire.PromptPin(len(longer), 60.0)], max_tokens=1)
    front.run()
    assert [front.explain(ids).has_own_pin for ids in (PROMPT, longer, longest)] == [True, True, False]
    assert front.explain(longest).n_pinned > 0


def test_a_request_without_pins_leaves_nothing_pinned() -> None:
    front = Frontend()
    front.serve("a")
    assert front.explain(PROMPT).n_pinned == 0


def test_a_request_that_is_cancelled_before_its_first_token_pins_nothing() -> None:
    front = Frontend()
    front.serve("a")
    front.submit("b", pins=[wire.PromptPin(len(PROMPT), 60.0)])
    front.cancel("b")
    front.run()
    assert front.explain(PROMPT).n_pinned == 0
    front.submit("c", pins=[wire.PromptPin(len(PROMPT), 60.0)], n=2)
    while not front.received["c"].tokens:
        front.turn()
    front.cancel("c")
    front.run()
    assert front.explain(PROMPT).n_pinned == 8


def test_several_prefixes_have_lifetimes_of_their_own() -> None:
    front = Frontend()
    front.serve("a", PROMPT, pins=[wire.PromptPin(5, 100.0), wire.PromptPin(9, 10.0)])
    assert (front.explain(PROMPT).n_pinned, front.explain(PROMPT).pin_seconds_left) == (8, 10.0)
    front.now = 10.0
    assert (front.explain(PROMPT).n_pinned, front.explain(PROMPT).pin_seconds_left) == (4, 90.0)


def test_a_message_pins_what_is_cached_and_ends_the_pin() -> None:
    front = Frontend()
    assert front.pin(PROMPT, 60.0) == cache_messages.Pinned("pin", 11, 0, 0.0)
    front.submit("a")
    front.serve("b", salt="s")
    assert front.pin(PROMPT, 60.0) == cache_messages.Pinned("pin", 11, 8, 60.0)
    assert front.explain(PROMPT, "s").n_pinned == 0, "another salt"
    assert front.pin([*PROMPT, 99, 99, 99], 0.0) == cache_messages.Pinned("pin", 14, 8, 60.0), "another prompt"
    assert front.pin(PROMPT, 0.0) == cache_messages.Pinned("pin", 11, 0, 0.0)


def test_a_flush_ends_pins() -> None:
    front = Frontend()
    front.serve("a")
    front.pin(PROMPT, 60.0)
    front.loop.receive(cache_messages.Flush("f"))
    front.serve("b")
    assert (front.explain(PROMPT).n_cached, front.explain(PROMPT).n_pinned) == (10, 0)


@pytest.mark.parametrize(
    "pins",
    [
        [wire.PromptPin(12, 60.0)],
        [wire.PromptPin(-1, 60.0)],
        [wire.PromptPin(4, -1.0)],
        [wire.PromptPin(4, 86401.0)],
        [wire.PromptPin(4, float("nan"))],
        [wire.PromptPin(4, 60.0)] * 5,
    ],
)
def test_wrong_pins_fail_the_request(pins: list[wire.PromptPin]) -> None:
    front = Frontend()
    front.submit("a", pins=pins)
    failed = front.received["a"].terminal
    assert (failed.code, failed.param) == ("invalid_request", "prompt_cache_options")


@pytest.mark.parametrize("ttl_s", [-1.0, 86401.0, float("nan")])
def test_a_wrong_time_to_live_is_refused(ttl_s: float) -> None:
    reply = Frontend().pin(PROMPT, ttl_s)
    assert (reply.code, reply.param) == ("invalid_request", "ttl")


def host_engine(write_policy: str = "through") -> Engine:
    return Engine(64, PAGE_SIZE, n_slots=40, write_policy=write_policy)


def pinned_in_host(engine: Engine, tokens: list[int]) -> int:
    return engine.host.tree.retentions.find(Namespace(), token_bytes(tokens)).n_retained


@pytest.mark.parametrize("write_policy", ["through", "selective"])
def test_what_is_stored_after_the_pin_is_pinned_in_the_host_tier(write_policy: str) -> None:
    engine, tokens = host_engine(write_policy), prompt(20)
    engine.serve(tokens, 1)
    engine.pins.pin(Namespace(), token_bytes(tokens), 60.0)
    engine.turn(4)
    assert pinned_in_host(engine, tokens) == 5
    engine.now = 60.0
    engine.pins.expire()
    assert pinned_in_host(engine, tokens) == 0


def test_a_pin_that_ends_while_its_store_is_in_flight_leaves_nothing_pinned() -> None:
    engine, tokens = host_engine("selective"), prompt(20)
    engine.finishes_copies = False
    engine.serve(tokens, 1)
    engine.pins.pin(Namespace(), token_bytes(tokens), 60.0)
    engine.turn()
    engine.pins.unpin(Namespace(), token_bytes(tokens))
    engine.finish_copies()
    engine.turn()
    assert engine.host.matches([(Namespace(), token_bytes(tokens))]) == [20], "the store has finished"
    assert pinned_in_host(engine, tokens) == 0


def test_a_pinned_prompt_outlives_others_in_the_host_tier() -> None:
    engine, tokens = host_engine(), prompt(20)
    engine.serve(tokens, 1)
    engine.pins.pin(Namespace(), token_bytes(tokens), 600.0)
    for first in range(2, 8):
        engine.serve(prompt(40, first), 1)
        engine.turn(4)
    assert engine.host.n_evicted > 0
    assert engine.host.matches([(Namespace(), token_bytes(tokens))]) == [20]


def test_a_flush_while_a_store_is_in_flight_leaves_nothing_pinned() -> None:
    engine, tokens = host_engine(), prompt(20)
    engine.finishes_copies = False
    engine.serve(tokens, 1)
    engine.turn()
    engine.pins.pin(Namespace(), token_bytes(tokens), 60.0)
    engine.turn()
    engine.pins.clear()
    engine.host_tier.flush()
    engine.cache.flush()
    engine.finish_copies()
    engine.turn()
    assert pinned_in_host(engine, tokens) == 0
    engine.check_idle()
