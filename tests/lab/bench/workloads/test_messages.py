"""Workloads that send chat messages."""

import json
from itertools import pairwise

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.chat import Chat, generate_chats
from support.json_lines import write_lines
from support.sessions import collect_requests, collect_turns, make, said


def chats_of(loaded, answer):
    """Yields the only request of each turn of every session."""
    for session in loaded.sessions:
        turns = collect_turns(session, answer)
        assert {len(turn) for turn in turns} == {1}
        yield [turn[0] for turn in turns]


def last_user(request):
    return next(message["content"] for message in reversed(request.prompt) if message["role"] == "user")


def test_chats_are_sent_turn_by_turn_with_the_models_answers():
    chats = list(chats_of(make("chat"), lambda _: ["Well.\nMore."]))
    loaded = [chat for chat, _ in zip(generate_chats(0, 8), range(32), strict=False)]
    assert len(chats) == len(loaded) == 32
    for requests, chat in zip(chats, loaded, strict=True):
        assert [last_user(request) for request in requests] == [user for user, _ in chat.turns]
        system = [{"role": "system", "content": chat.system}] if chat.system else []
        assert requests[0].prompt[:-1] == system
        for before, after in pairwise(requests):
            assert after.prompt[:-1] == [*before.prompt, {"role": "assistant", "content": "Well."}]
        for request, (_, answer) in zip(requests, chat.turns, strict=True):
            assert request.check(said(answer))
            assert request.check(said(answer + "user\n\nHello!"))
            assert not request.check(said(answer[:-1]))
            assert not request.check(said("Well. " + answer))


RECORDED = [
    ("system", "Be kind."),
    ("user", "u1"),
    ("assistant", "a1"),
    ("tool", "t1"),
    ("assistant", "a2"),
    ("user", "u2"),
    ("assistant", "a3"),
    ("user", "u3"),
    ("assistant", "a4"),
]


def write(folder, *conversations):
    lines = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in conversations]
    return write_lines(folder / "recorded.jsonl", *lines)


def texts(request):
    return [message["content"] for message in request.prompt]


def test_recorded_agents_are_replayed_with_their_own_messages(tmp_path):
    path = write(tmp_path, RECORDED, RECORDED[1:3], [("system", "s"), ("user", "x" * 20000), ("assistant", "a")])
    loaded = make("agents", Source(0, path), num_sessions=3, num_turns=2)
    recorded = [text for _, text in RECORDED]
    assert [texts(request) for request in collect_requests(loaded.sessions)] == [
        recorded[:2],
        recorded[:4],
        recorded[:6],
        ["u1"],
    ]
    assert loaded.counts == {"too_long": 1}
    assert all(request.check is None for request in collect_requests(loaded.sessions))


def test_recordings_without_requests_are_refused(tmp_path):
    path = write(tmp_path, RECORDED[:2], [("user", "x" * 20000), ("assistant", "a")])
    with pytest.raises(ConfigError, match=r"first 2 conversations of .* have no request to send: .*too_long': 1"):
        make("agents", Source(0, path), num_sessions=2)


def test_the_users_of_recorded_chats_get_the_models_own_answers(tmp_path):
    path = write(tmp_path, RECORDED, [("assistant", "Hello!")], RECORDED[1:])
    loaded = make("chat", Source(0, path), num_sessions=2, num_turns=3)
    first, second = chats_of(loaded, lambda _: ["Yes.\nMore."])
    assert texts(first[-1]) == ["Be kind.", "u1", "Yes.\nMore.", "u2", "Yes.\nMore.", "u3"]
    assert texts(second[-1]) == texts(first[-1])[1:]
    assert len(first) == len(second) == 3
    assert loaded.counts == {"never_asked": 1}
    for chat in chats_of(make("chat", Source(0, path), num_sessions=2, num_turns=2), lambda _: ["Yes."]):
        assert texts(chat[-1])[-3:] == ["u1", "Yes.", "u2"]
        assert len(chat) == 2
    only = make("chat", Source(0, path), num_sessions=1)
    assert only.counts == {}  # conversations after the last needed one do not count


def test_chats_with_recorded_answers_have_the_expected_ones(tmp_path):
    chats = chats_of(make("chat", history="recorded"), lambda _: ["Well."])
    for requests, chat in zip(chats, generate_chats(0, 8), strict=False):
        for before, after, (_, answer) in zip(requests, requests[1:], chat.turns, strict=False):
            assert after.prompt[:-1] == [*before.prompt, {"role": "assistant", "content": answer}]
            assert before.check(said(answer))
    recorded = [text for _, text in RECORDED]
    source = Source(0, write(tmp_path, RECORDED))
    (chat,) = chats_of(make("chat", source, num_sessions=1, num_turns=2, history="recorded"), lambda _: ["Yes."])
    assert [texts(request) for request in chat] == [recorded[:2], recorded[:4], recorded[:6]]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_recorded_system_prompt_is_sent_with_the_role_system(tmp_path, role):
    path = write(tmp_path, [(role, "Be kind."), ("user", "u1"), (role, "Be brief."), ("user", "u2")])
    (chat,) = chats_of(make("chat", Source(0, path), num_sessions=1), lambda _: ["Yes."])
    assert chat[0].prompt == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "u1"}]
    assert texts(chat[1]) == ["Be kind.", "u1", "Yes.", "u2"]


def test_turns_of_recorded_chats_beyond_the_limit_are_left_out_and_counted(tmp_path):
    contents = [
        ("system", "ä" * 100),
        ("user", "ö" * 100),
        ("assistant", "a" * 9000),
        ("user", "u2"),
        ("user", "u3"),
    ]
    path = write(tmp_path, contents, [("user", "x" * 1000)], contents)
    two = [
        {"role": "system", "content": "ä" * 100},
        *({"role": "user", "content": text} for text in ("ö" * 100, "u2")),
    ]
    just = len(json.dumps(two, ensure_ascii=False, separators=(",", ":")))
    for limit, n_turns, n_left_out in ((just, 2, 3), (just - 1, 1, 5)):
        loaded = Chat(num_sessions=2, max_characters=limit).make(Source(0, path))
        assert [session.n_requests for session in loaded.sessions] == [n_turns] * 2
        assert loaded.counts == {"too_long": n_left_out}
    with pytest.raises(
        ConfigError, match="has 0 conversations whose first user message is within max_characters 200"
    ):
        Chat(num_sessions=1, max_characters=200).make(Source(0, path))
    assert make("chat", Source(0, path), num_sessions=3).counts == {}


def test_files_in_sharegpts_format_can_be_used(tmp_path):
    path = tmp_path / "sharegpt.json"
    contents = [{"from": "human", "value": "u1"}, {"from": "gpt", "value": "a1"}, {"from": "human", "value": "u2"}]
    path.write_text(json.dumps([{"id": "x", "conversations": contents}]))
    (chat,) = chats_of(make("chat", Source(0, path), num_sessions=1), lambda _: ["Yes."])
    assert texts(chat[-1]) == ["u1", "Yes.", "u2"]
    (replay,) = chats_of(make("agents", Source(0, path), num_sessions=1), lambda _: ["Yes."])
    assert [texts(request) for request in replay] == [["u1"]]


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_data_set_that_is_too_short_or_of_another_format_is_refused(tmp_path, name):
    path = write(tmp_path, RECORDED)
    with pytest.raises(ConfigError, match=r"has 1 conversations.*; the workload needs 2; .* lower num_sessions"):
        make(name, Source(0, path), num_sessions=2)
    path.write_text('{"text": "t", "questions": []}\n')
    with pytest.raises(ConfigError, match="use --workload long-document-qa"):
        make(name, Source(0, path))
