import json

from radixkv.lab.bench.workloads.conversations import Conversation, replay_sessions
from support.sessions import collect_requests

CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"key": "red"}'}}
RECORDED_TASK = [
    {"role": "system", "content": "You find things."},
    {"role": "user", "content": "Where is the red key?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "attic"},
    {"role": "assistant", "content": "In the attic."},
    {"role": "user", "content": "Thank you."},
]


def prompts_of(session):
    return [request.prompt for request in collect_requests([session])]


def test_each_answer_of_the_recording_is_requested_after_the_messages_before_it():
    run = replay_sessions([Conversation(RECORDED_TASK)], 16)
    (session,) = run.sessions
    assert prompts_of(session) == [RECORDED_TASK[:2], RECORDED_TASK[:4]]
    assert prompts_of(session) == [RECORDED_TASK[:2], RECORDED_TASK[:4]]
    assert session.n_requests == 2
    assert {request.output_len for request in next(session.turns())} == {16}
    assert run.counts == {}


def test_consecutive_assistant_messages_give_one_request():
    hello, name = ({"role": "assistant", "content": text} for text in ("Hello.", "Who are you?"))
    messages = [hello, {"role": "user", "content": "Hi"}, hello, name, {"role": "user", "content": "Ann"}, hello]
    (session,) = replay_sessions([Conversation(messages)], 16).sessions
    assert prompts_of(session) == [messages[:2], messages[:5]]


def test_conversations_without_answers_are_counted():
    run = replay_sessions([Conversation([]), Conversation(RECORDED_TASK[:2]), Conversation(RECORDED_TASK)], 16)
    assert [session.n_requests for session in run.sessions] == [2]
    assert run.counts == {"never_answered": 2}


def test_requests_above_the_limit_are_left_out_and_counted():
    long = [*RECORDED_TASK[:3], {**RECORDED_TASK[3], "content": "ä" * 500}, *RECORDED_TASK[4:]]
    just = len(json.dumps(long[:4], ensure_ascii=False, separators=(",", ":")))
    assert replay_sessions([Conversation(long)], 16, max_characters=just).counts == {}
    run = replay_sessions([Conversation(long)] * 2, 16, max_characters=just - 1)
    assert [prompts_of(session) for session in run.sessions] == [[long[:2]]] * 2
    assert run.counts == {"too_long": 2}
    assert replay_sessions([Conversation(long)], 16, max_characters=10).sessions == []
