"""Conversations of models with recurrent layers or window pages keep their states while they pause."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.runtime.pauses.pauses import Turn
from radixkv.tree.node import Namespace
from radixkv.wire.cache_messages import BeginPause
from support.engine import MESSAGE_ENDS, Engine
from support.fake_device import unpack

(MESSAGE_END,) = MESSAGE_ENDS


def message(n: int, first: int) -> list[int]:
    """Returns a message of which no page is that of another ``first``."""
    return [10 + first, *(10 + (first * 31 + n_before * 7) % 83 for n_before in range(2, n)), MESSAGE_END]


def answer(engine: Engine, prompt: list[int], pause_s: float | None) -> list[int]:
    """Serves a turn, whose client says how long it will pause; returns prompt and answer."""
    request = engine.serve(prompt, 12)
    if pause_s is not None:
        engine.pauses.end_turn(request, Turn(engine.pauses, True, "", pause_s))
        engine.pauses.begin(BeginPause("", request.id))
    return unpack(bytes(request.tokens))


RECURRENT = {"n_states": 5, "state_block_tokens": 4}
MIXED = {"mixed_window": 9, "pages_per_slab": 2}


@pytest.mark.parametrize(("model", "n_pages"), [(RECURRENT, 400), (MIXED, 120)], ids=["states", "tails"])
@pytest.mark.parametrize("pauses", [True, False])
def test_a_conversation_that_is_expected_back_keeps_what_it_goes_on_from(
    model: dict[str, Any], n_pages: int, pauses: bool
) -> None:
    engine = Engine(n_pages, 4, max_num_batched_tokens=64, **model)
    tokens = answer(engine, message(24, 1), 5.0 if pauses else None)
    for first in range(2, 14):
        answer(engine, message(24, first), None)
    assert (engine.n_cached([*tokens, 5, 6, 7], Namespace()) >= 20) == pauses
    engine.run_to_the_end()


def test_states_of_pauses_that_end_later_go_first() -> None:
    engine = Engine(400, 4, max_num_batched_tokens=64, **RECURRENT)
    chats = [answer(engine, message(24, first), pause_s) for first, pause_s in ((1, 5.0), (2, 50.0), (3, 9.0))]
    for first in range(4, 12):
        answer(engine, message(24, first), 20.0)
    assert [engine.n_cached([*tokens, 5, 6], Namespace()) >= 20 for tokens in chats] == [True, False, True]
