"""The rule by which routers choose a server."""

from __future__ import annotations

from collections import Counter

from radixkv.routing import ServerChoice


def test_the_longest_match_wins_unless_it_is_short():
    choice = ServerChoice()
    assert choice.choose(100, {"a": 0, "b": 40, "c": 64}, {"c": 3}) == "c"
    assert choice.choose(100, {"a": 0, "b": 29, "c": 0}, {"a": 2}) == "b", "it has not had a request"
    assert choice.choose(100, {"a": 0, "b": 29, "c": 0}, {"a": 2, "b": 1, "c": 0}) == "c"


def test_a_busy_server_gets_nothing_for_its_match():
    matched = {"a": 100, "b": 0}
    assert ServerChoice().choose(100, matched, {"a": 8, "b": 0}) == "a"
    assert ServerChoice().choose(100, matched, {"a": 9, "b": 0}) == "b"
    assert ServerChoice().choose(100, matched, {"a": 60, "b": 20}) == "a"
    assert ServerChoice().choose(100, matched, {"a": 61, "b": 20}) == "b"


def test_no_server_gets_most_of_the_prompts_that_all_begin_alike():
    choice, n_servers = ServerChoice(), 4
    matched = dict.fromkeys(range(n_servers), 0)
    sent = []
    for _ in range(1000):
        sent.append(choice.choose(100, matched, {}))
        matched[sent[-1]] = 100
    assert max(Counter(sent[-128:]).values()) <= 1.5 * 32 + 1


def test_a_server_that_is_gone_is_not_chosen():
    choice = ServerChoice()
    sent = [choice.choose(10, {"a": 0, "b": 0}, {}) for _ in range(20)]
    assert set(sent) == {"a", "b"}
    assert {choice.choose(10, {"b": 0}, {}) for _ in range(20)} == {"b"}
    assert choice.choose(10, {"a": 0, "b": 0}, {}) == "a"


def test_chats_stay_where_they_are_while_those_of_another_server_are_between_two_turns():
    choice, n_chats = ServerChoice(), 200
    of = {"a": {"a": 400, "b": 320}, "b": {"a": 320, "b": 400}}
    for n in range(n_chats):
        for server in ("a", "b"):
            assert choice.choose(500, of[server], {"a": n, "b": n}) == server
    for first, second in (("a", "b"), ("b", "a")):
        for n in range(n_chats):
            assert choice.choose(500, of[first], {first: n}) == first
        for n in range(n_chats):
            assert choice.choose(500, of[second], {first: n_chats, second: n}) == second


def test_a_server_that_is_busy_for_long_gets_nothing_for_its_match():
    choice, matched = ServerChoice(), {"a": 400, "b": 320}
    for n in range(200):
        assert choice.choose(500, matched, {"a": 200, "b": 200}) == "a", n
    sent = [choice.choose(500, matched, {"a": 450, "b": 10}) for _ in range(2000)]
    assert sent.index("b") > 50
    assert set(sent[-100:]) == {"b"}
