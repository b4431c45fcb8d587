"""Errands that need calls of tools, one after another or several at once."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.lab.bench.session import Message, ToolCall
from radixkv.lab.bench.workloads.problems import mentions
from radixkv.lab.bench.workloads.templates import Gaps, Values, draw_values, read_templates
from radixkv.lab.bench.workloads.tools import TOOLS, Tool

N_TOOLS = 3
"""Tools of each task."""
HELD_OUT_SHARE = 8
"""One in this many sets of tools is never seen in training."""


@dataclass(frozen=True)
class Call:
    """A call of a tool with its result."""

    tool: Tool
    arguments: Values
    result: str
    """The content of the message with the result."""

    @property
    def sentence(self) -> str:
        """The part of the answer to the user that is about this call."""
        return self.tool.answer.format_map(self.arguments | json.loads(self.result))

    def tool_call(self, call_id: str) -> ToolCall:
        """Returns the call as a server would report it."""
        return ToolCall(self.tool.name, json.dumps(self.arguments), call_id)


@dataclass(frozen=True)
class Errand:
    """A user's message with the calls that it needs, and the answer."""

    user: str
    steps: tuple[tuple[Call, ...], ...]
    """The calls, grouped by answer of the assistant; a later step needs the results of the earlier ones."""
    answer: str

    @property
    def calls(self) -> list[Call]:
        """The calls of all steps."""
        return [call for step in self.steps for call in step]

    def is_done_by(self, calls: Sequence[ToolCall], answer: str) -> bool:
        """Returns whether these are the calls that the errand needs, in any order, and the answer has the results.

        The answer must have the values of the results, in whatever words.
        """
        expected = Counter(_key(call.tool_call("")) for call in self.calls)
        results = [value for call in self.calls for value in json.loads(call.result).values()]
        return Counter(map(_key, calls)) == expected and all(
            value is True or mentions(answer, value) for value in results
        )


@dataclass(frozen=True)
class Agent:
    """An agent with some tools."""

    system: str
    tools: tuple[Tool, ...]

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format."""
        return [tool.definition for tool in self.tools]

    def task(self, rng: random.Random, n_errands: int) -> AgentTask:
        """Returns a conversation of ``n_errands`` random errands."""
        world = str(rng.getrandbits(32))
        chains = [chain for chain in CHAINS if chain.first in self.tools and chain.second in self.tools]
        return AgentTask(self, world, tuple(_draw_errand(rng, self.tools, world, chains) for _ in range(n_errands)))

    def run(self, call: ToolCall, world: str) -> str:
        """Returns the result of a call as JSON; a wrong call gives an ``error``."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            return json.dumps({"error": f"there is no tool {call.name}"})
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return json.dumps({"error": "the arguments are not JSON"})
        return json.dumps(tool.run(arguments, world))


@dataclass(frozen=True)
class AgentTask:
    """A conversation of a user with an agent."""

    agent: Agent
    world: str
    """The world in which the tools are called; an argument of ``Tool.run``."""
    errands: tuple[Errand, ...]


SYSTEMS = (
    "You run errands with your tools.",
    "You are a helpful assistant. Use your tools, then answer in one short sentence each.",
    "Answer the user from what your tools say.",
)


def generate_agents(seed: int, *, is_held_out: bool = True) -> Iterator[Agent]:
    """Yields endless agents; equal arguments give equal agents.

    Args:
        seed: any integer.
        is_held_out: whether the sets of tools are those that training leaves out, or the others.
    """
    rng = random.Random(f"{seed} {is_held_out}")
    while True:
        tools = _draw_tools(rng)
        if is_held_out_set(tools) is is_held_out:
            yield Agent(rng.choice(SYSTEMS), tools)


def generate_agent_tasks(seed: int, n_errands: int, *, is_held_out: bool = True) -> Iterator[AgentTask]:
    """Yields endless tasks of ``n_errands`` errands, each of another agent; arguments as of ``generate_agents``."""
    rng = random.Random(f"{seed} {n_errands}")
    for agent in generate_agents(seed, is_held_out=is_held_out):
        yield agent.task(rng, n_errands)


def errand_messages(errand: Errand, *, first_id: int = 0) -> list[Message]:
    """Returns an errand's messages, calls and results included, the answer last."""
    messages: list[Message] = [{"role": "user", "content": errand.user}]
    for step in errand.steps:
        ids = [f"call_{first_id + position}" for position in range(len(step))]
        first_id += len(step)
        parts = [call.tool_call(call_id).message_part for call, call_id in zip(step, ids, strict=True)]
        messages.append({"role": "assistant", "content": "", "tool_calls": parts})
        messages += [
            {"role": "tool", "tool_call_id": call_id, "content": call.result}
            for call, call_id in zip(step, ids, strict=True)
        ]
    return [*messages, {"role": "assistant", "content": errand.answer}]


def task_messages(task: AgentTask) -> list[Message]:
    """Returns the whole conversation as chat messages."""
    messages: list[Message] = [{"role": "system", "content": task.agent.system}]
    for errand in task.errands:
        messages += errand_messages(errand, first_id=len(messages))
    return messages


def is_held_out_set(tools: Sequence[Tool]) -> bool:
    """Returns whether training leaves out this set of tools."""
    names = " ".join(sorted(tool.name for tool in tools))
    return zlib.crc32(names.encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Chain:
    """A template of errands in which the second call needs a result of the first."""

    first: Tool
    second: Tool
    gaps: Gaps
    user: str
    second_arguments: Mapping[str, str]
    """Where each parameter of the second call gets its value from: a gap, or a result of the first call."""

    def errand(self, rng: random.Random, world: str) -> Errand:
        """Returns an errand with random values in the gaps."""
        values = draw_values(rng, self.gaps)
        first = _run(self.first, self.first.arguments(values), world)
        found = values | json.loads(first.result)
        arguments = {name: found[source] for name, source in self.second_arguments.items()}
        second = _run(self.second, arguments, world)
        return Errand(self.user.format_map(values), ((first,), (second,)), f"{first.sentence} {second.sentence}")


_TOOLS = {tool.name: tool for tool in TOOLS}
CHAINS = tuple(
    Chain(**chain | {"first": _TOOLS[chain["first"]], "second": _TOOLS[chain["second"]]})
    for chain in read_templates("chains", dict[str, Any])
)


def _run(tool: Tool, arguments: Values, world: str) -> Call:
    return Call(tool, arguments, json.dumps(tool.run(arguments, world)))


def _draw_errand(rng: random.Random, tools: Sequence[Tool], world: str, chains: Sequence[Chain]) -> Errand:
    """Returns an errand that needs one call, two or three at once, or two in a row."""
    kind = rng.random()
    if chains and kind < 0.4:
        return rng.choice(chains).errand(rng, world)
    chosen = rng.sample(tools, min(len(tools), rng.choice((2, 2, 3)))) if kind > 0.7 else [rng.choice(tools)]
    users, calls = [], []
    for tool in chosen:
        values = draw_values(rng, tool.gaps)
        users.append(rng.choice(tool.users).format_map(values))
        calls.append(_run(tool, tool.arguments(values), world))
    link = rng.choice((" ", " Also: ", " And: "))
    return Errand(link.join(users), (tuple(calls),), " ".join(call.sentence for call in calls))


def _draw_tools(rng: random.Random) -> tuple[Tool, ...]:
    """Returns different tools in random order; two in three times some of them make a chain."""
    chain = rng.choice(CHAINS)
    first = [chain.first, chain.second] if rng.random() < 2 / 3 else []
    others = [tool for tool in TOOLS if tool not in first]
    return tuple(rng.sample([*first, *rng.sample(others, N_TOOLS - len(first))], N_TOOLS))


def _key(call: ToolCall) -> tuple[str, str]:
    """Returns name and arguments in one notation, so that equal calls have equal keys."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments
