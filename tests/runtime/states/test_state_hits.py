"""How much of their prompts requests find in a cache of a model with recurrent layers."""

from __future__ import annotations

import pytest

from support.cases import rest_nightly
from support.engine import Engine

BLOCK = 64
MESSAGE_END = 3


def text(n: int, first: int) -> list[int]:
    """Returns tokens that end no message, and of which no page is that of another ``first``."""
    return [10 + first, *(10 + (first * 31 + n_before * 7) % 89 for n_before in range(1, n))]


def engine(n_states: int) -> Engine:
    return Engine(1500, 16, n_states=n_states, state_block_tokens=BLOCK, max_num_batched_tokens=2048)


def found(engine: Engine, prompt: list[int]) -> int:
    request = engine.serve(prompt, 1)
    return len(prompt) - sum(row[2] for row in engine.device.computed if row[0] == request.last_step)


@pytest.mark.parametrize("n_shared", rest_nightly(range(130, 430), kept=range(0, 300, 43)))
def test_all_prompts_after_the_second_find_the_fork_less_a_block(n_shared: int) -> None:
    """The first prompt of a stem is new, and the second shows where prompts fork."""
    one = engine(20)
    stem = text(n_shared, 1)
    hits = [found(one, stem + text(40 + n, 2 + n)) for n in range(12)]
    assert hits[0] == 0
    assert all(n_shared - BLOCK < hit <= n_shared for hit in hits[2:])


def test_shared_system_prompts_stay_while_turns_and_questions_pass() -> None:
    """Prompts fork some tokens behind the system prompt's state, so that one page follows it in the tree."""
    one = engine(6)
    systems = [[*text(1050, n), MESSAGE_END] for n in (1, 2)]
    for system in systems:
        assert found(one, [*system, *text(200, 5), MESSAGE_END, *text(3, 6)]) == 0
    for n in range(12):
        assert found(one, [*systems[n % 2], *text(200, 10 + n), MESSAGE_END, *text(3, 6)]) == 1024


def test_the_states_of_a_chat_that_went_on_are_the_first_to_go() -> None:
    """Each turn takes the room of the one before; that of another chat stays."""
    one = engine(4)
    other = [*text(300, 1), MESSAGE_END, *text(100, 2), MESSAGE_END, *text(3, 3)]
    found(one, other)
    chat = [*text(300, 4), MESSAGE_END]
    for turn in range(6):
        chat += [*text(150, 10 + turn), MESSAGE_END]
        hit = found(one, chat + text(3, 3))
        assert hit >= 256 or not turn
        assert hit > len(chat) - 171 - BLOCK or not turn
        chat += text(20, 30 + turn)
    assert found(one, other) == 384


def test_a_canary_keeps_no_state() -> None:
    one = engine(4)
    prompt = text(300, 1)
    request = one.add(prompt, 1)
    request.is_canary = True
    one.run()
    assert found(one, prompt) == 0
