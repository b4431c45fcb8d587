"""At which answers' ends states are kept, and whose slots they take."""

from __future__ import annotations

import pytest

from radixkv.runtime.request import Request
from radixkv.tree.states import NodeStates
from support.cases import rest_nightly
from support.engine import Engine
from support.fake_device import unpack

BLOCK = 16
MESSAGE_END = 3


def text(n: int, first: int) -> list[int]:
    """Returns tokens that end no message, and of which no page is that of another ``first``."""
    return [10 + first, *(10 + (first * 31 + n_before * 7) % 89 for n_before in range(1, n))]


def opened(n_states: int) -> Engine:
    return Engine(600, 4, n_states=n_states, state_block_tokens=BLOCK, max_num_batched_tokens=512)


def states_of(engine: Engine) -> NodeStates:
    states = engine.cache.recurrent_states
    assert states is not None
    return states


def positions(engine: Engine) -> list[int]:
    return sorted(state.n_tokens for state in states_of(engine))


def n_found(engine: Engine, request: Request) -> int:
    return request.n_prompt - sum(row[2] for row in engine.device.computed if row[0] == request.last_step)


def chat(engine: Engine, first: int, n_turns: int, *, repeats: bool, n_new: int = 40) -> list[int]:
    """Returns how much each turn has found."""
    prompt, found = [*text(30, first), MESSAGE_END, 4], []
    for turn in range(n_turns):
        n_steps = len(engine.device.computed)
        request = engine.serve(prompt, n_new)
        found.append(request.n_prompt - engine.device.computed[n_steps][2])
        answer = unpack(bytes(request.known_key))[len(prompt) :] if repeats else text(n_new, first + turn)
        prompt = [*prompt, *answer, *text(10, turn), MESSAGE_END, 4]
    return found


def test_the_next_turn_goes_on_from_the_end_of_the_answer_if_it_repeats_it() -> None:
    engine = opened(20)
    assert chat(engine, 1, 4, repeats=True) == [0, 64, 112, 160]
    assert chat(engine, 2, 4, repeats=False) == [0, 16, 80, 128]
    engine.check_idle()


def test_after_some_answers_that_were_not_repeated_none_is_saved_until_one_is() -> None:
    """The pages of answers show that one was repeated, also where no state was kept. The end of a chat's only
    message says nothing, because other chats may go on from it."""
    engine = opened(100)
    chat(engine, 1, 3, repeats=False)
    n_saved = states_of(engine).n_saved
    chat(engine, 2, 1, repeats=False)
    assert states_of(engine).n_saved == n_saved + 1, "that of the prompt"
    assert chat(engine, 3, 5, repeats=True) == [0, 16, 80, 160, 224]


@pytest.mark.nightly
@pytest.mark.parametrize("n_tokens", rest_nightly([512, 64], kept=(1,)), ids=["whole prompts", "chunks"])
def test_answers_that_are_longer_than_what_follows_them_show_that_they_are_not_repeated(n_tokens: int) -> None:
    """As where a template leaves long reasoning out: the next prompt may end before the answer did, or its first
    row does. The same prompt again shows nothing."""
    engine = Engine(600, 4, n_states=100, state_block_tokens=BLOCK, max_num_batched_tokens=n_tokens)
    prompt = [*text(30, 1), MESSAGE_END, 4]
    for turn in range(3):
        engine.serve(prompt, 150)
        engine.serve(prompt, 150)
        n_saved = states_of(engine).n_saved
        prompt = [*prompt, *text(10, 50 + turn), MESSAGE_END, *text(20, 60 + turn), MESSAGE_END, 4]
    engine.serve(prompt, 150)
    assert states_of(engine).n_saved == n_saved + 1, "that of the prompt"


def test_an_answer_that_is_aborted_or_shorter_than_a_block_has_no_state() -> None:
    engine = opened(20)
    engine.serve([*text(33, 1), MESSAGE_END], 10)
    assert positions(engine) == [32]
    request = engine.add([*text(33, 2), MESSAGE_END], 40)
    while len(request.known_key) < 4 * 60:
        engine.turn()
    engine.abort(request)
    engine.run()
    assert positions(engine) == [32, 32]
    engine.check_idle()


@pytest.mark.parametrize(("n_states", "n_most"), [(1, 0), (2, 1), (6, 3)])
def test_half_of_the_slots_may_be_of_answers_that_are_not_complete(n_states: int, n_most: int) -> None:
    engine = opened(n_states)
    requests = [engine.add(text(8, 1 + n), 60) for n in range(6)]
    while any(len(request.known_key) < 4 * 44 for request in requests):
        engine.turn()
        assert engine.scheduler.running.block_tables()
        assert n_states - states_of(engine).n_free <= 2 * n_most
    engine.run()
    engine.check_idle()
    assert positions(engine) == [64] * n_most


def test_no_state_that_a_prompt_left_gives_way_until_an_answer_was_repeated() -> None:
    engine = opened(4)
    for n in range(4):
        engine.serve([*text(33, 1 + n), MESSAGE_END], 1)
    engine.serve(text(8, 9), 60)
    assert positions(engine) == [32] * 4
