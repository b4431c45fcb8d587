"""A replay in virtual time takes the time that its steps and copies take, and compares what a server learns."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.lab.bench.workloads.mooncake import BLOCK_LEN, TraceRequest, generate_trace
from radixkv.lab.simulator.answers import RecordedAnswers
from radixkv.lab.simulator.arrivals import RecordedArrivals, SyntheticArrivals
from radixkv.lab.simulator.caches import CacheSettings
from radixkv.lab.simulator.server_policies import KNOWS_NOTHING, ServerPolicies
from radixkv.lab.simulator.step_time import StepTime
from radixkv.lab.simulator.timed_replay import Server, TimedReplay, TimedTraffic
from radixkv.lab.simulator.traffic import BlockTraffic, TokenTraffic
from radixkv.lab.simulator.turns import Turn, find_turns
from radixkv.wire.messages import pack_tokens
from support.cases import rest_nightly

PAGE_SIZE = 16
STEPS = StepTime(fixed_s=0.01, row_s=0.001, prompt_token_s=0.0001, read_token_s=0.00001)
"""No two parts of it can be taken for each other."""
SERVER = Server(STEPS)


def replay(
    prompts,
    lengths,
    *,
    times=None,
    arrivals=None,
    calls=None,
    n_pages=1000,
    host_pages=None,
    are_limited=False,
    policies=KNOWS_NOTHING,
    server=SERVER,
):
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    turns = find_turns(traffic, lengths)
    if arrivals is None:
        arrivals = RecordedArrivals(turns, times or [0.0] * len(prompts), 1.0)
    answers = RecordedAnswers(traffic, lengths, are_limited=are_limited)
    timed = TimedTraffic(traffic, answers, turns, calls or [()] * len(prompts), arrivals)
    return TimedReplay(timed, CacheSettings(n_pages, host_pages=host_pages), policies, server).run()


def tokens(random, n):
    return [random.randrange(1, 30_000) for _ in range(n)]


def test_requests_that_run_alone_take_what_their_steps_take():
    random = Random(1)
    first, other = tokens(random, 100), tokens(random, 50)
    prompts = [first, other, [*first, *tokens(random, 60)]]
    result = replay(prompts, [3, 1, 2], times=[5.0, 15.0, 25.0])
    n_found = 96  # the whole pages of the first prompt and of its answer
    assert result.replay.n_cached_tokens == [0, 0, n_found]
    computed = [100, 50, 160 - n_found]
    assert [one.ttft_s for one in result.seen] == pytest.approx([0.01 + 0.0001 * n for n in computed])
    # The second token of the first answer is computed after 101 tokens, the third one after 102.
    decode_s = [0.01 + 0.001 + 0.00001 * n for n in (101, 102, 161)]
    assert [one.stall_s for one in result.seen] == pytest.approx([decode_s[1], 0.0, decode_s[2]])
    assert [one.is_return for one in result.seen] == [False, False, True]
    assert result.seen[2].was_on_device
    assert result.seconds == pytest.approx(20.0 + 0.01 + 0.0001 * computed[2] + decode_s[2])


def test_a_turn_does_not_come_before_the_answer_that_it_goes_on_from():
    random = Random(2)
    first = tokens(random, 64)
    prompts = [first, [*first, *tokens(random, 60)]]
    result = replay(prompts, [40, 1], times=[0.0, 0.02])
    assert result.replay.n_cached_tokens == [0, (64 + 39) // PAGE_SIZE * PAGE_SIZE]
    n_computed = 124 - result.replay.n_cached_tokens[1]
    row_s = 0.01 + 0.001 + 0.00001 * 104  # launched before the token was known that ended the answer
    assert result.seen[1].ttft_s == pytest.approx(row_s + 0.01 + 0.0001 * n_computed), "it came as the answer ended"
    assert result.seconds > 40 * 0.01


def naive_turns_of_tokens(prompts):
    turns = []
    for index, prompt in enumerate(prompts):
        before = [
            one for one in range(index) if prompts[one] != prompt and prompt[: len(prompts[one])] == prompts[one]
        ]
        best = max(before, key=lambda one: (len(prompts[one]), one), default=None)
        turns.append(None if best is None else Turn(best, len(prompts[best])))
    return turns


@pytest.mark.parametrize("seed", range(20))
def test_a_request_goes_on_from_the_longest_shorter_earlier_prompt_that_it_begins_with(seed):
    random, prompts = Random(seed), []
    for _ in range(60):
        old = random.choice(prompts) if prompts and random.random() < 0.8 else []
        prompts.append((*old, *(random.randrange(3) for _ in range(random.randrange(3)))) or (7,))
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    assert find_turns(traffic, [1] * 60) == naive_turns_of_tokens(prompts)


def test_no_prompt_goes_on_from_an_equal_one():
    prompts = [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    assert find_turns(traffic, [1] * 4) == [None, None, Turn(1, 2), Turn(1, 2)]


def test_turns_of_a_trace_are_those_of_its_sessions():
    trace = generate_trace(4, 300)
    lengths = [request.output_length for request in trace]
    session_of = {}
    expected = []
    for index, request in enumerate(trace):
        n_whole = request.input_length // BLOCK_LEN
        own = [block for block in request.hash_ids[1:n_whole] if block in session_of]
        before = session_of[own[-1]] if own else None
        expected.append(before)
        session_of |= dict.fromkeys(request.hash_ids[1:n_whole], index)
    traffic = BlockTraffic(trace, PAGE_SIZE, "engine", compact_pages=False)
    found = [None if turn is None else turn.before for turn in find_turns(traffic, lengths)]
    # A prompt whose last whole block is that which all prompts begin with tells nothing of its session.
    assert sum(one is not None for one in expected) > 150
    assert [one for one in zip(found, expected, strict=True) if one[0] != one[1]] == []


def test_only_a_prompt_that_has_room_for_the_answer_goes_on_from_a_trace():
    def request(n_tokens, ids):
        return TraceRequest(timestamp=0, input_length=n_tokens, output_length=200, hash_ids=ids)

    trace = [request(1300, [0, 1, 2]), request(1490, [0, 1, 3]), request(1500, [0, 1, 4]), request(600, [0, 5])]
    traffic = BlockTraffic(trace, PAGE_SIZE, "engine", compact_pages=False)
    assert find_turns(traffic, [200] * 4) == [None, None, Turn(0, 1024), None]


def agents(random, n_agents, n_turns):
    """Returns conversations whose tools are quick or slow, turn by turn, and the tools of each answer."""
    prompts, calls = [], []
    for agent in range(n_agents):
        prompt = tokens(random, 200)
        for turn in range(n_turns):
            prompts.append(list(prompt))
            calls.append(() if turn == n_turns - 1 else ("quick",) if agent % 2 else ("slow",))
            prompt += tokens(random, 120)
    return prompts, calls


class Paused:
    """Arrivals of agents whose quick tools take 1 s and whose slow ones never end in time."""

    def __init__(self, prompts, calls, turns):
        self._next = {turn.before: index for index, turn in enumerate(turns) if turn is not None}
        self._calls = calls
        first = [index for index, turn in enumerate(turns) if turn is None]
        self._first = [(0.25 * number, index) for number, index in enumerate(first)]

    def first(self):
        return self._first

    def after(self, index, now):
        pause_s = {("quick",): 3.0, ("slow",): 40.0}.get(self._calls[index])
        return [] if pause_s is None else [(now + pause_s, self._next[index])]


def test_what_is_learnt_of_pauses_finds_more_and_the_oracle_finds_most():
    prompts, calls = agents(Random(5), n_agents=24, n_turns=4)
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    arrivals = Paused(prompts, calls, find_turns(traffic, [1] * len(prompts)))
    cached, on_device = {}, {}
    for pauses in ("none", "learnt", "known"):
        result = replay(
            prompts,
            [20] * len(prompts),
            arrivals=arrivals,
            calls=calls,
            n_pages=220,
            policies=ServerPolicies(pauses=pauses),
        )
        assert len(result.seen) == len(prompts)
        cached[pauses] = result.replay.cache_use.n_cached
        on_device[pauses] = sum(one.was_on_device for one in result.seen)
    assert 1.05 * cached["none"] < cached["learnt"] < cached["known"]
    assert on_device["none"] < on_device["learnt"] < on_device["known"]


@pytest.mark.parametrize("are_limited", rest_nightly([False, True], kept=(0,)))
def test_admission_learns_lengths_of_answers_that_a_token_ends(are_limited):
    """Before the first ones have ended only ``max_tokens`` may tell how long they will be."""
    random = Random(6)
    n, length = 32, 150
    prompts = [tokens(random, 1000) for _ in range(2 * n)]
    times = [0.0] * n + [600.0] * n
    preempted = {}
    for admission in ("reserved", "expected", "known"):
        for last in (n, 2 * n):
            result = replay(
                prompts[:last],
                [length] * last,
                times=times[:last],
                n_pages=2190,
                are_limited=are_limited,
                server=Server(),
                policies=ServerPolicies(admission=admission),
            )
            preempted[admission, last // n] = result.counts.n_preemptions
    first = {admission: preempted[admission, 1] for admission in ("reserved", "expected", "known")}
    second = {admission: preempted[admission, 2] - first[admission] for admission in first}
    assert first["expected"] == (first["known"] if are_limited else first["reserved"])
    assert first["known"] < first["reserved"]
    assert second["expected"] == second["known"] < second["reserved"]


def test_loads_take_time_and_some_are_made_ahead():
    random = Random(7)
    chats = [tokens(random, 600) for _ in range(12)]
    prompts = [*chats, *([*chat, *tokens(random, 40)] for chat in chats)]
    times = [0.5 * number for number in range(12)] + [30.0] * 12
    server = Server(STEPS, max_num_seqs=2)
    loaded, ahead = {}, {}
    for loads_ahead in (False, True):
        result = replay(
            prompts,
            [30] * 24,
            times=times,
            n_pages=200,
            host_pages=2000,
            server=server,
            policies=ServerPolicies(loads_ahead=loads_ahead),
        )
        loaded[loads_ahead] = result.replay.cache_use.n_loaded
        ahead[loads_ahead] = result.counts.n_pages_loaded_ahead
    assert min(loaded.values()) > 0
    assert ahead[False] == 0 < ahead[True]


def test_synthetic_pauses_are_those_of_tools_and_users_and_equal_each_time():
    turns = [None, Turn(0, 1), Turn(1, 1), None, Turn(3, 1)]
    calls = [("search", "edit"), (), (), ("edit",), ()]

    def make(tool_median_s, user_median_s):
        return SyntheticArrivals(
            turns, calls, request_rate=2.0, tool_median_s=tool_median_s, user_median_s=user_median_s
        )

    once, twice = make(1.0, 10.0), make(1.0, 10.0)
    assert [index for _, index in once.first()] == [0, 3]
    assert once.first() == twice.first()
    for index in range(5):
        assert once.after(index, 7.0) == twice.after(index, 7.0)
    slow_tools, slow_users = make(5.0, 10.0), make(1.0, 50.0)
    for index, slow in ((0, slow_tools), (3, slow_tools), (1, slow_users)):
        [(at, following)], [(later, _)] = once.after(index, 0.0), slow.after(index, 0.0)
        assert following == index + 1
        assert later == pytest.approx(5 * at)
    assert once.after(2, 0.0) == []


@pytest.mark.parametrize("n_states", [None, 64])
def test_children_of_an_agent_that_come_at_once_compute_what_they_begin_with_once(n_states):
    """Those that wait for it come to their first tokens no later than the steps of all that is new take."""
    random = Random(3)
    prefix = tokens(random, 64 * 40)
    prompts = [prefix + tokens(random, 30) for _ in range(16)]
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    turns = find_turns(traffic, [1] * 16)
    answers = RecordedAnswers(traffic, [1] * 16, are_limited=True)
    timed = TimedTraffic(traffic, answers, turns, [()] * 16, RecordedArrivals(turns, [0.0] * 16, 1.0))
    server = SERVER._replace(max_num_batched_tokens=512)
    result = TimedReplay(timed, CacheSettings(4000, n_states=n_states), KNOWS_NOTHING, server).run()
    assert sum(result.replay.n_cached_tokens) == 15 * len(prefix)
    n_new = len(prefix) + 16 * 30
    assert max(one.ttft_s for one in result.seen) < 0.01 * (n_new // 512 + 3) + 0.0001 * n_new + 16 * 0.001
