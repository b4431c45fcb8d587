"""The workload of agents that call tools."""

import json
from itertools import pairwise

import pytest

from radixkv.lab.bench.session import Reply, ToolCall
from radixkv.lab.bench.workloads.agents import MAX_ROUNDS, Agents
from radixkv.lab.bench.workloads.base import Source
from support.agent_oracle import next_reply
from support.sessions import collect_turns, said


def make(seed=0, **sizes):
    return Agents(**sizes).make(Source(seed)).sessions


def requests_of(session, answer):
    turns = collect_turns(session, answer)
    assert {len(turn) for turn in turns} == {1}
    return [turn[0] for turn in turns]


def solve(request):
    return next_reply(request.prompt)


def roles(messages):
    return [message["role"] for message in messages]


def test_agents_with_the_same_tools_share_the_system_prompt_and_the_examples():
    firsts = [requests_of(session, solve)[0] for session in make(num_sessions=8)]
    heads = {}
    for request in firsts:
        assert len(request.tools) == 3
        heads.setdefault(json.dumps([request.tools, request.prompt[0]]), []).append(request.prompt)
    assert len(heads) == 4
    for shared in heads.values():
        assert len(shared) == 2
        assert shared[0][:-1] == shared[1][:-1]
        assert roles(shared[0]).count("user") == 13


@pytest.mark.parametrize("seed", range(5))
def test_an_agent_gets_the_results_of_its_calls_until_it_answers(seed):
    for session in make(seed, num_shots=2):
        requests = requests_of(session, solve)
        assert len(requests) == session.n_requests
        for request in requests:
            assert not request.ignore_eos
            reply = solve(request)
            assert request.check(reply) is (None if reply.tool_calls else True)
        for before, after in pairwise(requests):
            reply = solve(before)
            assert after.prompt[: len(before.prompt) + 1] == [*before.prompt, reply.message]
            rest = after.prompt[len(before.prompt) + 1 :]
            assert roles(rest) == (["tool"] * len(reply.tool_calls) or ["user"])
            for call, result in zip(reply.tool_calls, rest, strict=False):
                assert result["tool_call_id"] == call.id


def test_an_answer_without_the_calls_or_without_their_results_is_wrong():
    for session in make(num_shots=0, num_turns=1):
        *calling, last = requests_of(session, solve)
        assert last.check(said("Done.")) is False or "done" in last.prompt[-1]["content"]
        assert calling[0].check(solve(last)) is False, "the answer without the calls"


def changed(call, **fields):
    return ToolCall(**{"name": call.name, "arguments": call.arguments, "id": call.id} | fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: changed(call, name="no_such_tool"),
        lambda call: changed(call, arguments="{"),
        lambda call: changed(call, arguments="[1]"),
        lambda call: changed(call, arguments="{}"),
        lambda call: changed(call, arguments=json.dumps({**json.loads(call.arguments), "more": 1})),
    ],
)
def test_a_wrong_call_gets_an_error_as_its_result_and_makes_the_answer_wrong(change):
    for session in make(num_shots=0, num_turns=1):

        def answer(request):
            if request.prompt[-1]["role"] == "tool":
                return said("I do not know.")
            reply = solve(request)
            return Reply(reply.texts, tuple(map(change, reply.tool_calls)))

        _, second = requests_of(session, answer)
        assert all("error" in json.loads(message["content"]) for message in second.prompt[3:])
        assert second.check(said("I do not know.")) is False


def test_equal_calls_in_another_notation_or_order_are_right():
    def answer(request):
        reply = solve(request)
        calls = [
            changed(call, arguments=json.dumps(dict(reversed(json.loads(call.arguments).items())), indent=1))
            for call in reply.tool_calls
        ]
        return Reply(reply.texts, tuple(calls))

    for session in make(num_shots=0):
        for request in requests_of(session, answer):
            assert request.check(solve(request)) is not False


def test_an_agent_that_only_calls_is_stopped_and_wrong():
    (session,) = make(num_sessions=1, num_turns=1, num_shots=0)
    call = Reply(("",), (ToolCall("order", "{}", "c"),))
    requests = requests_of(session, lambda request: call)
    assert len(requests) == MAX_ROUNDS
    assert [request.check(call) for request in requests] == [*[None] * (MAX_ROUNDS - 1), False]


def test_the_examples_depend_on_the_seed_alone():
    """They do not depend on the numbers of sessions and turns, and differ from the sessions' own errands."""

    def heads(seed, **changes):
        firsts = [requests_of(session, solve)[0] for session in make(seed, **changes)]
        return {json.dumps([first.tools, first.prompt[:-1]]) for first in firsts}

    few, many, other = heads(0, num_sessions=2), heads(0, num_sessions=20, num_turns=5), heads(1, num_sessions=20)
    assert few < many
    assert not many & other
