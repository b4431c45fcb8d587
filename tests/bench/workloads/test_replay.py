import json

from radixkv.bench.session import Reply
from radixkv.bench.workloads.datasets.conversations import Conversation
from radixkv.bench.workloads.replay import replayed

CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"key": "red"}'}}
ERRAND = [
    {"role": "system", "content": "You find things."},
    {"role": "user", "content": "Where is the red key?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "attic"},
    {"role": "assistant", "content": "In the attic."},
    {"role": "user", "content": "Thank you."},
]


def played(session, said="something else"):
    """The prompts of a session whose every answer is ``said``."""
    turns = session.turns()
    prompts = []
    requests = next(turns)
    while True:
        (request,) = requests
        prompts.append(request.prompt)
        try:
            requests = turns.send((Reply((said,)),))
        except StopIteration:
            return prompts


def test_each_answer_of_the_recording_is_asked_for_behind_what_came_before():
    run = replayed([Conversation(ERRAND)], 16)
    (session,) = run.sessions
    assert played(session) == [ERRAND[:2], ERRAND[:4]]
    assert played(session) == [ERRAND[:2], ERRAND[:4]]
    assert session.n_requests == 2
    assert {request.output_len for request in next(session.turns())} == {16}
    assert run.counts == {}


def test_only_the_first_of_several_messages_in_a_row_is_asked_for():
    hello, name = ({"role": "assistant", "content": text} for text in ("Hello.", "Who are you?"))
    messages = [hello, {"role": "user", "content": "Hi"}, hello, name, {"role": "user", "content": "Ann"}, hello]
    (session,) = replayed([Conversation(messages)], 16).sessions
    assert played(session) == [messages[:2], messages[:5]]


def test_what_nobody_answered_is_counted():
    run = replayed([Conversation([]), Conversation(ERRAND[:2]), Conversation(ERRAND)], 16)
    assert [session.n_requests for session in run.sessions] == [2]
    assert run.counts == {"never_answered": 2}


def test_requests_beyond_a_limit_are_left_out_and_counted():
    long = [*ERRAND[:3], {**ERRAND[3], "content": "ä" * 500}, *ERRAND[4:]]
    just = len(json.dumps(long[:4], ensure_ascii=False, separators=(",", ":")))
    assert replayed([Conversation(long)], 16, max_characters=just).counts == {}
    run = replayed([Conversation(long)] * 2, 16, max_characters=just - 1)
    assert [played(session) for session in run.sessions] == [[long[:2]]] * 2
    assert run.counts == {"too_long": 2}
    assert replayed([Conversation(long)], 16, max_characters=10).sessions == []
