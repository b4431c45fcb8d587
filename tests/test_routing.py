"""The rule by which routers choose a server."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from radixkv.routing import ServerChoice


def test_the_longest_match_wins_unless_it_is_short():
    choice = ServerChoice()
    assert choice.choose(100, {"a": 0, "b": 40, "c": 64}, {"c": 3}, 0.0) == "c"
    assert choice.choose(100, {"a": 0, "b": 29, "c": 0}, {"a": 2}, 0.0) == "b", "it has not had a request"
    assert choice.choose(100, {"a": 0, "b": 29, "c": 0}, {"a": 2, "b": 1, "c": 0}, 0.0) == "c"


def test_a_busy_server_gets_nothing_for_its_match():
    matched = {"a": 100, "b": 0}
    assert ServerChoice().choose(100, matched, {"a": 8, "b": 0}, 0.0) == "a"
    assert ServerChoice().choose(100, matched, {"a": 9, "b": 0}, 0.0) == "b"
    assert ServerChoice().choose(100, matched, {"a": 60, "b": 20}, 0.0) == "a"
    assert ServerChoice().choose(100, matched, {"a": 61, "b": 20}, 0.0) == "b"


def test_no_server_gets_most_of_the_prompts_that_all_begin_alike():
    choice, n_servers = ServerChoice(), 4
    matched = dict.fromkeys(range(n_servers), 0)
    sent = []
    for _ in range(1000):
        sent.append(choice.choose(100, matched, {}, 0.0))
        matched[sent[-1]] = 100
    assert max(Counter(sent[-128:]).values()) <= 1.5 * 32 + 1


def test_a_server_that_is_gone_is_not_chosen():
    choice = ServerChoice()
    sent = [choice.choose(10, {"a": 0, "b": 0}, {}, 0.0) for _ in range(20)]
    assert set(sent) == {"a", "b"}
    assert {choice.choose(10, {"b": 0}, {}, 0.0) for _ in range(20)} == {"b"}
    assert choice.choose(10, {"a": 0, "b": 0}, {}, 0.0) == "a"


def test_chats_stay_where_they_are_while_those_of_another_server_are_between_two_turns():
    choice, n_chats, clock = ServerChoice(), 200, count(0.0, 0.001)
    of = {"a": {"a": 400, "b": 320}, "b": {"a": 320, "b": 400}}
    for n in range(n_chats):
        for server in ("a", "b"):
            assert choice.choose(500, of[server], {"a": n, "b": n}, next(clock)) == server
    for first, second in (("a", "b"), ("b", "a")):
        for n in range(n_chats):
            assert choice.choose(500, of[first], {first: n}, next(clock)) == first
        for n in range(n_chats):
            assert choice.choose(500, of[second], {first: n_chats, second: n}, next(clock)) == second


@pytest.mark.parametrize("weight", [1, 100])
@pytest.mark.parametrize("n_a_second", [5, 100])
def test_a_server_that_is_busy_for_two_seconds_gets_nothing_for_its_match(weight: int, n_a_second: int):
    """However much its requests weigh, and however many prompts come."""
    choice, matched, clock = ServerChoice(), {"a": 400, "b": 320}, count(0.0, 1 / n_a_second)
    for n in range(200):
        now_s = next(clock)
        assert choice.choose(500, matched, {"a": 200 * weight, "b": 200 * weight}, now_s) == "a", n
    sent = [
        choice.choose(500, matched, {"a": 450 * weight, "b": 10 * weight}, next(clock))
        for _ in range(20 * n_a_second)
    ]
    assert 0.1 * n_a_second < sent.index("b") <= 2 * n_a_second
    assert set(sent[-5 * n_a_second :]) == {"b"}


def test_nothing_is_kept_of_servers_that_are_gone():
    choice = ServerChoice()
    for n in range(2000):
        choice.choose(100, {n: 0, n + 1: 0}, {n: 3}, float(n))
    assert len(choice._usual) == 2
    assert len(choice._n_recent) <= 64
