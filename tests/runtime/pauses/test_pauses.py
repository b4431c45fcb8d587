"""Conversations that pause, with a loop, a fake device and a clock that tests set."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import msgspec
import pytest

from radixkv.runtime.pauses import pause_times, pauses
from radixkv.settings.tenants import TenantConfig
from radixkv.wire.messages import Failed
from radixkv.wire.stats import PauseKindStats, PauseStats
from support.loop_frontend import Frontend

N_PAGES = 32


def turn(
    front: Frontend, name: str, prompt: Sequence[int], *tools: str, resumes: str = "", tenant: str = ""
) -> list[int]:
    """Serves a turn and begins its pause; returns its prompt and answer."""
    received = front.serve(name, prompt, may_pause=True, resumes=resumes, tenant=tenant, temperature=0.0)
    front.begin_pause(name, *tools)
    return [*prompt, *received.tokens[0]]


def numbered(first: int, n_tokens: int = 20) -> list[int]:
    return list(range(first, first + n_tokens))


def learn(front: Frontend, tool: str, pause_s: float, first: int, n_times: int = 8) -> None:
    """Lets a tool take this long in a few conversations, and empties the cache."""
    for number in range(n_times):
        tokens = turn(front, f"{tool} {number}", numbered(first), tool)
        front.now += pause_s
        front.serve(f"{tool} {number} back", [*tokens, 1], resumes=f"{tool} {number}")
    front.flush()


def press(front: Frontend, first: int = 700, n_prompts: int = 6) -> None:
    """Serves prompts of nobody who comes back, which need all pages several times."""
    for number in range(n_prompts):
        front.now += 0.01
        front.serve(f"pressure {first} {number}", numbered(first + 40 * number, 40), temperature=0.0)


def n_cached(front: Frontend, tokens: list[int]) -> int:
    return front.explain(tokens).n_cached


def stats(front: Frontend) -> PauseStats:
    found = front.stats().pauses
    assert found is not None
    return found


def totals(front: Frontend) -> PauseStats:
    return msgspec.structs.replace(stats(front), kinds={})


@pytest.fixture
def front() -> Frontend:
    return Frontend(n_pages=N_PAGES, max_num_seqs=4)


def test_a_conversation_that_is_expected_back_is_evicted_after_others(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    paused = turn(front, "paused", numbered(300), "search")
    done = front.serve("done", numbered(400), temperature=0.0)
    press(front)
    assert n_cached(front, paused) == 24
    assert n_cached(front, [*numbered(400), *done.tokens[0]]) == 0


def test_nothing_is_spared_before_anything_is_learnt(front: Frontend) -> None:
    paused = turn(front, "paused", numbered(300), "search")
    press(front)
    assert n_cached(front, paused) == 0


def test_the_tool_that_is_back_sooner_is_evicted_last(front: Frontend) -> None:
    learn(front, "fast", 0.5, first=100)
    learn(front, "slow", 30.0, first=200)
    slow = turn(front, "a", numbered(300, 40), "slow")
    fast = turn(front, "b", numbered(400, 40), "fast")
    slow_too = turn(front, "c", numbered(500, 40), "slow")  # used last: the pool holds two of the three
    front.serve("d", numbered(600, 10), temperature=0.0)
    assert n_cached(front, fast) == 44
    assert min(n_cached(front, slow), n_cached(front, slow_too)) < 44


def test_a_pause_of_a_user_is_learnt_as_that_of_a_tool(front: Frontend) -> None:
    for number in range(8):
        tokens = turn(front, f"chat {number}", numbered(100))
        front.now += 0.5
        front.serve(f"back {number}", [*tokens, 1], resumes=f"chat {number}")
    front.flush()
    paused = turn(front, "paused", numbered(300))
    press(front)
    assert n_cached(front, paused) == 24


def test_a_pause_that_has_ended_is_not_spared(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    paused = turn(front, "paused", numbered(300), "search")
    front.now += 0.1
    front.serve("back", [*paused, 1], resumes="paused")
    press(front)
    assert n_cached(front, paused) == 0


def test_a_pause_that_takes_too_long_is_given_up_and_learnt(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    paused = turn(front, "paused", numbered(300), "search")
    assert stats(front).n_pauses == 1
    front.now += 60.0
    press(front)
    assert n_cached(front, paused) == 0
    assert totals(front) == PauseStats(0, 0, returns_total=8, returns_on_device_total=8, given_up_total=1)


def test_what_is_learnt_of_each_tool_is_shown(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    learn(front, "test", 30.0, first=200, n_times=2)
    turn(front, "lost", numbered(300), "search")
    front.now += 60.0
    turn(front, "paused", numbered(400), "test", "search")
    kinds = stats(front).kinds
    assert list(kinds) == ["\0search", "\0test", "\0search\0test"]
    assert kinds["\0search\0test"] == PauseKindStats(1, 0, 0, 0)
    search, test = kinds["\0search"], kinds["\0test"]
    assert (search.n_open, search.returns_total, search.given_up_total) == (0, 8, 1)
    assert search.returns_on_device_total == 8
    assert search.median_s == pytest.approx(0.5)
    assert test.median_s == test.p90_s == pytest.approx(30.0)


def test_few_kinds_with_short_names_are_shown(front: Frontend) -> None:
    for number in range(30):
        turn(front, str(number), numbered(300), "f" * 1000, *(f"{number} {place}" for place in range(30)))
    kinds = stats(front).kinds
    assert len(kinds) == 16
    assert max(map(len, kinds)) < 600


def test_names_that_no_kind_can_keep_apart_are_counted_together(front: Frontend) -> None:
    for number, tools in enumerate([["f" * 1000], ["f" * 1001], ["\x1b[2J"], ["a, b"], ["a", "b"], ["a\0b"]]):
        turn(front, str(number), numbered(300), *tools)
    counts = {key: kind.n_open for key, kind in stats(front).kinds.items()}
    assert counts == {"\0" + "f" * 63 + "…": 2, "\0�[2J": 1, "\0a, b": 1, "\0a\0b": 1, "\0a�b": 1}


def test_a_return_is_on_the_device_only_as_a_whole(front: Frontend) -> None:
    paused = turn(front, "paused", numbered(300), "search")
    press(front)
    front.serve("back", [*paused, 1], resumes="paused")
    assert (stats(front).returns_total, stats(front).returns_on_device_total) == (1, 0)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("n_common", [0, 3])
def test_a_return_that_can_use_no_page_is_not_on_the_device_and_teaches_nothing(
    front: Frontend, n_common: int, is_cached: bool
) -> None:
    """As where the system prompt begins with the time of day."""
    prompt = numbered(300)
    paused = turn(front, "paused", prompt, "search")
    if not is_cached:
        press(front)
    front.serve("back", [*prompt[:n_common], 99, *paused, 1], resumes="paused")
    assert totals(front) == PauseStats(0, 0, returns_total=1, returns_on_device_total=0, given_up_total=0)
    assert not stats(front).kinds


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_return_with_one_common_page_is_on_the_device_if_that_is_there(front: Frontend, is_cached: bool) -> None:
    prompt = numbered(300)
    turn(front, "paused", prompt, "search")
    if not is_cached:
        press(front)
    front.serve("back", [*prompt[:5], 99, *prompt], resumes="paused")
    kind = stats(front).kinds["\0search"]
    assert (kind.returns_total, kind.returns_on_device_total) == (1, int(is_cached))
    assert (stats(front).returns_total, stats(front).returns_on_device_total) == (1, int(is_cached))


def test_a_client_says_how_long_a_pause_takes(front: Frontend) -> None:
    prompt = numbered(300)
    answer = front.serve("told", prompt, may_pause=True, expected_pause_s=5.0, temperature=0.0).tokens[0]
    front.begin_pause("told", "search")
    press(front)
    assert n_cached(front, [*prompt, *answer]) == 24
    front.now += 11.0  # twice as long
    press(front, first=400)
    assert n_cached(front, [*prompt, *answer]) == 0


def test_a_client_that_does_not_come_back_is_not_waited_for(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    front.serve("last", numbered(300), may_pause=True, expected_pause_s=0.0, temperature=0.0)
    front.begin_pause("last", "search")
    assert stats(front).n_pauses == 0


@pytest.mark.parametrize("name", ["unknown", "late"])
def test_pauses_of_unknown_answers_are_ignored(front: Frontend, name: str) -> None:
    front.serve("late", numbered(300))
    front.begin_pause(name, "search")
    front.serve("back", numbered(300, 30), resumes=name)
    assert totals(front) == PauseStats(0, 0, 0, 0, 0)


def test_a_cancelled_request_may_still_pause(front: Frontend) -> None:
    front.submit("a", numbered(300), may_pause=True, max_tokens=20)
    front.turn(3)
    front.cancel("a")
    front.run()
    front.begin_pause("a", "search")
    assert stats(front).n_pauses == 1


def test_a_flush_ends_all_pauses(front: Frontend) -> None:
    turn(front, "paused", numbered(300), "search")
    front.flush()
    assert stats(front).n_pauses == 0


@pytest.mark.parametrize(("name", "limit"), [("MAX_PAUSES", 2), ("MAX_PAUSED_BYTES", 2 * 26 * 4)])
def test_the_oldest_of_too_many_pauses_is_given_up(monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    monkeypatch.setattr(pauses, name, limit)
    front = Frontend(n_pages=N_PAGES, max_num_seqs=4)
    for number in range(3):
        turn(front, str(number), numbered(100 * number + 1), "search")
    front.serve("back", numbered(1), resumes="0")
    assert stats(front).n_pauses == 2
    assert stats(front).returns_total == 0


TENANTS = [TenantConfig("few"), TenantConfig("many")]


@pytest.mark.parametrize(
    ("module", "name", "limit"),
    [
        (pauses, "MAX_PAUSES", 4),
        (pauses, "MAX_PAUSED_BYTES", 4 * 26 * 4),
        (pauses, "_MAX_ENDED", 4),
        (pauses, "MAX_SPARED", 2),
        (pause_times, "MAX_KINDS", 2),
    ],
)
def test_a_tenant_with_many_chats_or_tools_pushes_out_nothing_of_another(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, limit: int
) -> None:
    monkeypatch.setattr(module, name, limit)
    front = Frontend(n_pages=512, max_num_seqs=4, tenants=TENANTS)
    tokens = turn(front, "learnt", numbered(1), "search", tenant="few")
    front.now += 0.5
    front.serve("back", [*tokens, 1], resumes="learnt", tenant="few")
    for number in range(6):
        tokens = turn(front, f"quick {number}", numbered(40 * number), f"tool {number}", tenant="many")
        front.now += 0.01
        front.serve(f"quick back {number}", [*tokens, 1], resumes=f"quick {number}", tenant="many")
    front.serve("paused", numbered(300), tenant="few", may_pause=True)
    for number in range(6):
        front.serve(f"ended {number}", numbered(40 * number), tenant="many", may_pause=True)
    front.begin_pause("paused", "search")
    for number in range(6):
        turn(front, f"many {number}", numbered(40 * number), f"tool {number % 6}", tenant="many")
    assert [*front.scheduler.returns.expected()][-1].namespace.tenant == "few"


def test_requests_never_wait_for_conversations_that_pause(front: Frontend) -> None:
    """The whole pool belongs to conversations that are expected back at once."""
    learn(front, "fast", 0.05, first=100)
    for number in range(5):
        turn(front, f"paused {number}", numbered(100 * number + 1), "fast")
    assert len(front.serve("large", numbered(600, 80), max_tokens=20).tokens[0]) == 20


def test_a_closed_session_is_not_waited_for(front: Frontend) -> None:
    learn(front, "search", 0.5, first=100)
    for name in ("mine", "other"):
        front.serve(name, numbered(300, 20 if name == "mine" else 30), may_pause=True, session_id=name)
        front.begin_pause(name, "search")
    front.close_session("mine")
    assert stats(front).n_pauses == 1
    assert stats(front).given_up_total == 0, "nothing is learnt of it"


def test_another_turn_of_a_session_ends_its_pauses(front: Frontend) -> None:
    """An answer was asked for again: nobody goes on from the first one."""
    for name in ("first", "again"):
        front.serve(name, numbered(300), may_pause=True, session_id="chat")
        front.begin_pause(name)
    assert stats(front).n_pauses == 1
    front.serve("back", numbered(300), resumes="first", session_id="chat")
    assert totals(front) == PauseStats(0, 0, 0, 0, 0)


@pytest.mark.parametrize("begins_late", [False, True])
def test_a_chat_that_goes_on_elsewhere_pauses_no_more_and_nothing_is_learnt(
    front: Frontend, begins_late: bool
) -> None:
    if begins_late:
        front.serve("a", numbered(300), may_pause=True)
        front.end_pause("a")
        front.begin_pause("a", "search")
    else:
        turn(front, "a", numbered(300), "search")
        front.end_pause("a")
    front.end_pause("unknown")
    front.now += 1000.0
    assert stats(front) == PauseStats(0, 0, 0, 0, 0)


def test_a_refused_request_ends_no_pause() -> None:
    front = Frontend(n_pages=N_PAGES, max_num_seqs=1, max_queued_requests=1)
    paused = turn(front, "paused", numbered(300), "search")
    front.submit("running", numbered(400), max_tokens=20)
    front.turn(2)
    front.submit("waiting", numbered(500))
    front.submit("refused", [*paused, 1], resumes="paused")
    assert isinstance(front.received["refused"].terminal, Failed)
    assert stats(front).n_pauses == 1
    front.run()
    front.serve("again", [*paused, 1], resumes="paused")
    assert (stats(front).n_pauses, stats(front).returns_total) == (0, 1)


def test_a_prompt_that_overtakes_the_begin_of_the_pause_ends_it(front: Frontend) -> None:
    prompt = numbered(300)
    answer = front.serve("first", prompt, may_pause=True).tokens[0]
    front.serve("back", [*prompt, *answer, 1], resumes="first")
    front.begin_pause("first", "search")
    assert stats(front).n_pauses == 0


def test_nobody_ends_the_pause_of_another_salt(front: Frontend) -> None:
    turn(front, "paused", numbered(300), "search")
    front.serve("foreign", numbered(300, 30), salt="other", resumes="paused")
    assert totals(front) == PauseStats(1, stats(front).n_spared_tokens, 0, 0, 0)


def test_an_id_that_is_used_again_counts_once(front: Frontend) -> None:
    for _ in range(3):
        turn(front, "same", numbered(300), "search")
    turn(front, "other", numbered(400), "search")
    assert stats(front).n_pauses == 2
