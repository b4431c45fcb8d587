"""States of recurrent layers and windows below the device: which are stored, and the requests that load them."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.tree.node import Namespace
from support.engine import Engine, token_bytes

MESSAGE_END = 3
SYSTEM = [*range(10, 33), MESSAGE_END]
"""A first message that ends at a position of a state."""

of_each_kind = pytest.mark.parametrize(
    "kind", [{"n_states": 10}, {"mixed_window": 5}], ids=["recurrent", "windows"]
)


def opened(kind: dict[str, int], **settings: Any) -> Engine:
    return Engine(60, 4, n_slots=60, **kind, **settings)


def chat(first: int) -> list[int]:
    return [*SYSTEM, *range(40 + first, 50 + first), MESSAGE_END, 4]


def in_host(engine: Engine) -> list[int]:
    assert engine.host.tree.states is not None
    return sorted(state.n_tokens for state in engine.host.tree.states)


@of_each_kind
def test_selective_stores_the_state_from_which_a_second_request_goes_on(kind: dict[str, int]) -> None:
    engine = opened(kind, write_policy="selective")
    engine.serve(chat(0))
    assert in_host(engine) == []
    engine.serve(chat(20))
    engine.store_all()
    assert in_host(engine) == [len(SYSTEM)]
    engine.run_to_the_end()


@of_each_kind
def test_a_pinned_prefix_is_stored_with_the_state_at_its_end(kind: dict[str, int]) -> None:
    engine = opened(kind, write_policy="selective")
    engine.serve(chat(0))
    engine.pins.pin(Namespace(), token_bytes(SYSTEM), 60.0)
    engine.store_all()
    assert in_host(engine) == [len(SYSTEM)]
    engine.pins.clear()
    engine.run_to_the_end()


@of_each_kind
def test_what_was_stored_is_written_to_disk_with_its_state(kind: dict[str, int]) -> None:
    engine = opened(kind, write_policy="selective", has_disk=True)
    engine.serve(chat(0))
    engine.serve(chat(20))
    engine.run_to_the_end()
    tokens = token_bytes(chat(20))
    disk = engine.host_tier.disk
    assert disk is not None
    assert disk.n_stored(Namespace(), tokens) == [len(SYSTEM)]


def test_loaded_requests_whose_tails_have_the_slabs_that_were_promised_to_one_before_them() -> None:
    """The first one lacks room for its window pages then, though no window page is in the place of other pages. It
    gives way to those that have room."""
    engine = Engine(24, 2, mixed_window=2, pages_per_slab=2, n_slots=60, max_num_batched_tokens=24)
    starts = [[10, MESSAGE_END], [20, 21, 22, 23, 24, MESSAGE_END], [30, MESSAGE_END]]
    for start in starts:
        engine.serve([*start, 4], 1)
    engine.store_all()
    assert in_host(engine) == [2, 2, 6]
    engine.cache.flush()
    engine.finishes_copies = False
    for start, n_tokens in zip(starts, (25, 15, 6), strict=True):
        engine.add([*start, *range(40, 40 + n_tokens - len(start))], 1)
    engine.turn()
    assert len(engine.copier.in_flight) == len(starts)
    engine.finishes_copies = True
    engine.run_to_the_end()


@of_each_kind
def test_a_turn_that_comes_back_is_still_one_and_was_not_computed_again(kind: dict[str, int]) -> None:
    """So it is evicted first once the next turn has gone on from it."""
    engine, prompt = opened(kind), chat(0)[:-1]
    engine.serve(prompt, 1)
    engine.store_all()
    states = engine.cache.tree.states
    assert states is not None
    n_saved = states.n_saved
    engine.cache.flush()
    engine.serve(prompt, 1)
    assert engine.host_tier.counters.n_pages_loaded
    assert [(state.n_tokens, state.is_turn) for state in states] == [(32, True)]
    assert states.n_saved == n_saved
    engine.run_to_the_end()


@of_each_kind
def test_a_sequence_for_which_the_host_tier_is_too_small_evicts_nothing(kind: dict[str, int]) -> None:
    """Without its last state its pages would be of no use."""
    engine = Engine(80, 4, n_slots=24, **kind)
    engine.serve(chat(0), 1)
    engine.store_all()
    before = in_host(engine)
    engine.serve([*range(100, 220), MESSAGE_END, 4], 1)
    engine.store_all()
    assert (in_host(engine), engine.host.n_evicted) == (before, 0)
    engine.run_to_the_end()


@of_each_kind
def test_a_prefix_on_disk_that_does_not_fit_the_host_tier_comes_up_to_an_earlier_state(
    kind: dict[str, int],
) -> None:
    """The disk tier was written by a server with more host memory."""
    before = Engine(200, 4, n_slots=150, has_disk=True, max_num_batched_tokens=256, **kind)
    long = [*SYSTEM, *(30 + n % 60 for n in range(120)), MESSAGE_END, 4]
    for prompt in (chat(0), long):
        before.serve(prompt, 1)
        before.store_all()
    engine = Engine(200, 4, n_slots=24, has_disk=True, max_num_batched_tokens=256, **kind)
    engine.store.pages = before.store.pages
    engine.serve(long, 1)
    assert engine.n_computed == len(long) - len(SYSTEM)
    engine.run_to_the_end()
