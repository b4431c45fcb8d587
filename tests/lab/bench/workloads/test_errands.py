"""Errands and their tools."""

from __future__ import annotations

import json
import re
from itertools import combinations, islice

from radixkv.lab.bench.session import ToolCall
from radixkv.lab.bench.workloads.errands import generate_agent_tasks, is_held_out_set, task_messages
from radixkv.lab.bench.workloads.tools import TOOLS
from support.agent_oracle import next_reply


def test_arguments_stand_in_the_request_or_in_earlier_results_and_results_in_the_answer() -> None:
    n_steps: set[tuple[int, int]] = set()
    for task in islice(generate_agent_tasks(1, n_errands=3), 300):
        for errand in task.errands:
            known = errand.user
            for step in errand.steps:
                for call in step:
                    for value in call.arguments.values():
                        assert re.search(rf"\b{re.escape(str(value))}\b", known), errand
                known += "".join(call.result for call in step)
            assert errand.is_done_by([call.tool_call("") for call in errand.calls], errand.answer), errand
            n_steps.add((len(errand.steps), len(errand.calls)))
    assert n_steps == {(1, 1), (1, 2), (1, 3), (2, 2)}


def test_an_errand_needs_all_its_calls_and_no_others_and_all_results() -> None:
    for task in islice(generate_agent_tasks(2, n_errands=2), 100):
        for errand in task.errands:
            calls = [call.tool_call("") for call in errand.calls]
            assert errand.is_done_by(calls[::-1], f"Well: {errand.answer} So it is.")
            assert not errand.is_done_by(calls[1:], errand.answer)
            assert not errand.is_done_by([*calls, calls[0]], errand.answer)
            assert not errand.is_done_by([*calls[1:], ToolCall(calls[0].name, "{}")], errand.answer)
            for value in [value for call in errand.calls for value in json.loads(call.result).values()]:
                if value is not True and not re.search(rf"\b{value}\b", errand.user):
                    assert not errand.is_done_by(calls, re.sub(rf"\b{value}\b", "what", errand.answer)), errand


def test_a_task_is_a_conversation_that_follows_from_its_requests() -> None:
    for task in islice(generate_agent_tasks(3, n_errands=3), 100):
        messages = task_messages(task)
        ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert len(set(ids)) == len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            reply = next_reply(messages[:index])
            calls = [call["function"] for call in message.get("tool_calls", ())]
            assert (reply.texts[0], [(call.name, call.arguments) for call in reply.tool_calls]) == (
                message["content"],
                [(call["name"], call["arguments"]) for call in calls],
            )
            for call, result in zip(message.get("tool_calls", ()), messages[index + 1 :], strict=False):
                made = ToolCall(call["function"]["name"], call["function"]["arguments"])
                assert result["content"] == task.agent.run(made, task.world)


def test_a_tool_gives_another_result_in_another_world_or_for_other_arguments() -> None:
    for tool in TOOLS:
        if tool.results:
            arguments = dict.fromkeys(tool.parameters, "x")
            results = {json.dumps(tool.run(arguments, str(world))) for world in range(20)}
            others = {json.dumps(tool.run({**arguments, name: "y"}, "0")) for name in arguments}
            assert len(results) > 3
            assert len(others) > 0
            assert tool.run(arguments, "0") == tool.run(arguments, "0")


def test_held_out_sets_of_tools_are_a_small_part_and_in_no_other_task() -> None:
    sets = list(combinations(TOOLS, 3))
    n_held_out = sum(map(is_held_out_set, sets))
    assert len(sets) / 12 < n_held_out < len(sets) / 5
    for is_held_out in (False, True):
        for task in islice(generate_agent_tasks(5, n_errands=1, is_held_out=is_held_out), 200):
            assert is_held_out_set(task.agent.tools) is is_held_out
            assert is_held_out_set(task.agent.tools[::-1]) is is_held_out
