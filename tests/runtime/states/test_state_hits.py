"""How much of their prompts requests find in a cache of a model with recurrent layers."""

from __future__ import annotations

import pytest

from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.engine import Engine, name_of

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


@pytest.mark.parametrize("n_shared", rest_nightly(range(130, 430), kept=(198,)))
def test_all_prompts_after_the_second_find_the_fork_less_a_block(n_shared: int) -> None:
    """The first prompt of a stem is new, and the second shows where prompts fork: it computes all of its tokens,
    unless the end of the first prompt is in the same block."""
    one = engine(20)
    stem = text(n_shared, 1)
    hits = [found(one, stem + text(40 + n, 2 + n)) for n in range(64)]
    n_blocks = n_shared - n_shared % BLOCK
    assert hits[:2] == [0, n_blocks if (n_shared + 39) // BLOCK * BLOCK == n_blocks else 0]
    assert all(n_shared - BLOCK < hit <= n_shared for hit in hits[2:])


def test_shared_system_prompts_stay_while_turns_and_questions_pass() -> None:
    """Prompts fork some tokens behind the system prompt's state, so that one page follows it in the tree."""
    one = engine(6)
    systems = [[*text(1050, n), MESSAGE_END] for n in (1, 2)]
    for system in systems:
        assert found(one, [*system, *text(200, 5), MESSAGE_END, *text(3, 6)]) == 0
    for n in range(12):
        assert found(one, [*systems[n % 2], *text(200, 10 + n), MESSAGE_END, *text(3, 6)]) == 1024


def test_another_last_message_goes_on_from_the_messages_before_it() -> None:
    """Examples as messages: the second question finds all of them, without a prompt that shows where both fork."""
    one = engine(6)
    examples = [token for n in range(5) for token in (*text(100, 1 + n), MESSAGE_END)]
    assert found(one, [*examples, *text(90, 20), MESSAGE_END, *text(3, 3)]) == 0
    assert found(one, [*examples, *text(90, 30), MESSAGE_END, *text(3, 3)]) == 448


def test_results_of_tools_in_an_open_turn_are_found_by_the_next_call() -> None:
    """The template ends no message between calls, and leaves out what the model thought before them."""
    one = engine(6)
    prompt = [*text(200, 1), MESSAGE_END, *text(50, 2), MESSAGE_END, *text(3, 3)]
    found(one, prompt)
    for n in range(5):
        n_before = len(prompt)
        prompt += text(15, 10 + n) + text(300, 20 + n)
        assert found(one, prompt) > n_before - 1 - BLOCK


@pytest.mark.parametrize("end", [MESSAGE_END, 10], ids=["message", "text"])
def test_a_prompt_of_whole_blocks_is_found_whole_by_the_next_turn_and_less_a_block_by_itself(end: int) -> None:
    one = engine(6)
    prompt = [*text(639, 1), end]
    assert [found(one, prompt) for _ in range(3)] == [0, 576, 576]
    assert found(one, prompt + text(100, 2)) == 640


def test_what_only_the_same_prompt_can_use_takes_no_place_of_turns() -> None:
    one = engine(4)
    prompts = [text(640, n) for n in range(3)]
    for prompt in prompts:
        assert found(one, prompt) == 0
    assert [found(one, prompt + text(20, 4)) for prompt in prompts] == [640] * 3


def test_agents_find_all_of_the_path_that_they_extend() -> None:
    """Each phase extends one of four prompts by four others, which have whole blocks; there is a slot for each."""
    one = engine(24)
    path = text(1024, 1)
    for phase in range(4):
        prompts = [path + text(192, 4 * phase + n + 2) for n in range(4)]
        hits = [found(one, prompt) for prompt in prompts]
        assert hits[1:] == [len(path)] * 3 or not phase
        assert hits[0] == len(path) or not phase
        path = prompts[phase]


def test_a_state_that_a_waiting_prompt_needs_is_not_the_next_to_go() -> None:
    """The oldest of four states is that of a chat whose next turn waits for two long ones of another chat."""
    one = engine(4)
    chats = [[*text(300, n), MESSAGE_END] for n in range(4)]
    for chat in chats:
        found(one, chat)
    for n in (4, 5):
        one.add(chats[2] + text(1700, n), 1)
    one.add(chats[0] + text(500, 6), 1)
    one.run()
    assert one.scheduler.states.stats().hits_total == 3


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


def test_a_flood_of_new_prompts_leaves_the_states_that_prompts_have_gone_on_from() -> None:
    """All arrive at once, with four slots: the ends of the prompts take turns in what is left."""
    one = engine(4)
    stem = text(300, 1)
    for n in range(3):
        found(one, stem + text(60, 2 + n))
    for n in range(30):
        one.add(text(200, 10 + n), 1)
    one.run()
    assert found(one, stem + text(70, 5)) == 256


def test_states_of_which_nobody_makes_use_any_more_give_way() -> None:
    """Of six stems in turn, each is found by its third prompt and later: those that were are no longer needed."""
    one = engine(4)
    for first in range(6):
        stem = text(300, 1 + 10 * first)
        assert [found(one, stem + text(60, 2 + 10 * first + n)) for n in range(4)] == [0, 0, 256, 256]


def test_a_canary_keeps_no_state() -> None:
    one = engine(4)
    prompt = text(300, 1)
    request = one.add(prompt, 1)
    request.is_canary = True
    one.run()
    assert found(one, prompt) == 0


def test_what_states_give_and_lack_is_counted() -> None:
    """The second prompt of a stem computes it once more, the third finds it, and keeps it in the only slot."""
    one = engine(1)
    stem = text(200, 1)
    for n in range(3):
        found(one, stem + text(60, 2 + n))
    stats = one.scheduler.states.stats()
    assert stats is not None
    assert (stats.n_slots, stats.n_slots_free, stats.saved_total, stats.evicted_total) == (1, 0, 2, 1)
    assert (stats.hits_total, stats.missed_tokens_total) == (1, 192)


def test_states_of_a_session_that_ends_go_first_but_for_those_that_others_go_on_from() -> None:
    """Both chats begin with one system prompt, which the first one computed; the closed one loses only its own."""
    one = engine(5)
    system = [*text(300, 1), MESSAGE_END]
    chats = [[*system, *text(200, 10 + n), MESSAGE_END, *text(3, 3)] for n in range(2)]
    for name, chat in zip(("first", "second"), chats, strict=True):
        one.serve(chat, 1, session_id=name)
    turn = [*chats[0], *text(150, 12), MESSAGE_END, *text(3, 3)]
    one.serve(turn, 1, session_id="first")
    assert one.scheduler.states.stats().n_slots_free == 1  # type: ignore[union-attr]
    assert found(one, [*system, *text(90, 30)]) == 256
    one.sessions.close(Namespace(), "first")
    for n in range(4):
        found(one, text(200, 20 + n))
    assert found(one, turn) == 256


@pytest.mark.parametrize(
    ("system", "n_tokens"),
    rest_nightly([([], 2048), ([], 300), ([MESSAGE_END], 2048), ([MESSAGE_END], 300)], kept=(3,)),
    ids=["text", "text in chunks", "system prompt", "system prompt in chunks"],
)
def test_prompts_that_arrive_together_wait_for_the_state_of_the_one_that_computes_it(
    system: list[int], n_tokens: int
) -> None:
    """Also where prompts fork in a text: those that wait show where."""
    one = Engine(3000, 16, n_states=80, state_block_tokens=BLOCK, max_num_batched_tokens=n_tokens, max_num_seqs=64)
    stem = text(700, 1) + system
    prompts = [stem + text(20, 2 + n) for n in range(64)]
    requests = [one.add(prompt, 1) for prompt in prompts]
    other = one.add(text(30, 90), 1)
    one.launch()
    assert other.last_step == 0, "only what shares the prefix waits"
    one.run()
    computed = sum(n for _, _, n in one.device.computed) - 30
    n_each = len(prompts[0]) - len(stem) // BLOCK * BLOCK
    assert computed == len(prompts[0]) + 63 * n_each
    assert len({request.last_step for request in requests}) <= 4 or n_tokens < 700


@pytest.mark.parametrize("n_shared", rest_nightly(range(130, 430), kept=(0, 62, 198)))
def test_of_prompts_that_arrive_in_one_step_only_the_first_computes_what_they_share(n_shared: int) -> None:
    """Each other one computes what it shares behind the last multiple of a block, and what is its own."""
    one = Engine(3000, 16, n_states=80, state_block_tokens=BLOCK, max_num_batched_tokens=2048, max_num_seqs=64)
    stem = text(n_shared, 1)
    prompts = [stem + text(40 + n, 2 + n) for n in range(64)]
    for prompt in prompts:
        one.add(prompt, 1)
    one.run()
    n_found = n_shared // BLOCK * BLOCK
    computed = sum(n for _, _, n in one.device.computed)
    assert computed == sum(map(len, prompts)) - 63 * n_found


def test_a_prompt_waits_for_no_state_that_saves_less_than_two_blocks() -> None:
    for n_shared, n_steps in ((127, 1), (128, 2)):
        one = Engine(1500, 16, n_states=20, state_block_tokens=BLOCK, max_num_batched_tokens=2048)
        stem = [*text(n_shared - 1, 1), MESSAGE_END]
        requests = [one.add(stem + text(90, 2 + n), 1) for n in range(3)]
        one.run()
        assert len({request.last_step for request in requests}) == n_steps


def test_a_prompt_whose_writer_fails_computes_the_prefix_itself() -> None:
    one = Engine(1500, 16, n_states=20, state_block_tokens=BLOCK, max_num_batched_tokens=2048)
    stem = [*text(300, 1), MESSAGE_END]
    first, second = (one.add(stem + text(90, 2 + n), 2) for n in range(2))
    one.failing_ids.add(first.id)
    one.run()
    assert [one.ended[name_of(each)].reason for each in (first, second)] == ["device_error", "length"]
