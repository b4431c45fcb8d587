"""Workload of agents that call tools."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from radixkv.bench.session import BenchRequest, Message, Session, Turns
from radixkv.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions, bad_lines, check_enough
from radixkv.bench.workloads.conversations import Conversation, read_conversations, replay_sessions
from radixkv.bench.workloads.problems import answer_line, prefix_check, tool_call_check
from radixkv.bench.workloads.words import CORNERS, DAYS, FOODS, GOODS, NAMES, STREETS, THINGS, TOWNS
from radixkv.errors import ConfigError


class Agents(FixedOutputParameters, frozen=True, kw_only=True, tag="agents"):
    """Agents that call one tool for each message of their user, and then answer.

    The prompt before each call and each answer is the conversation so far. Agents with the same tools share the
    system prompt and the example conversation. Recorded agents are replayed with their recorded messages.
    """

    num_sessions: int = 8
    num_turns: int = 3
    """User messages of each session; a recorded session may have fewer."""
    num_shots: int = 12
    """Turns of the example conversation before each generated session; recorded sessions have none."""
    max_characters: int = 18_000
    """Maximum length of a replayed request's messages as JSON; longer ones are left out as ``too_long``."""
    output_len: int = 40

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each agent. O(size).

        Raises:
            ConfigError: the data set of conversations cannot be read, is too short, or has no request that is short
                enough.
        """
        if source.dataset is None:
            return self._generate(source.seed)
        read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
        check_enough(source, "conversations", len(read.items), self.num_sessions, settings="num_sessions")
        truncated = [_truncate(conversation, self.num_turns) for conversation in read.items[: self.num_sessions]]
        replayed = replay_sessions(truncated, self.output_len, max_characters=self.max_characters)
        counts = {**bad_lines(read.n_bad_lines), **replayed.counts}
        if not replayed.sessions:
            raise ConfigError(
                f"the first {self.num_sessions} conversations of {source.dataset} have no request to send: "
                f"{counts}; raise num_sessions or max_characters"
            )
        return WorkloadSessions(replayed.sessions, counts)

    def _generate(self, seed: int) -> WorkloadSessions:
        tasks = list(islice(generate_tool_tasks(seed, self.num_turns), self.num_sessions))
        heads = self._heads({task.system for task in tasks}, seed + 1)
        return WorkloadSessions([self._session(heads[task.system], task) for task in tasks])

    def _heads(self, systems: set[str], seed: int) -> dict[str, list[Message]]:
        """Returns for each system prompt the messages that all its sessions begin with."""
        heads: dict[str, list[Message]] = {}
        for task in generate_tool_tasks(seed, self.num_shots):
            if len(heads) == len(systems):
                break
            if task.system in systems:
                heads.setdefault(task.system, [*tool_task_messages(task)])
        return heads

    def _session(self, head: list[Message], task: ToolTask) -> Session:
        def turns() -> Turns:
            messages = list(head)
            for turn in task.turns:
                messages.append({"role": "user", "content": turn.user})
                (reply,) = yield (BenchRequest(list(messages), self.output_len, check=tool_call_check(turn.call)),)
                messages.append({"role": "assistant", "content": answer_line(reply.texts[0], turn.call)})
                messages.append({"role": "tool", "content": turn.result})
                (reply,) = yield (BenchRequest(list(messages), self.output_len, check=prefix_check(turn.answer)),)
                messages.append({"role": "assistant", "content": answer_line(reply.texts[0], turn.answer)})

        return Session(turns, n_requests=2 * len(task.turns))


def _truncate(conversation: Conversation, n_turns: int) -> Conversation:
    """Returns the conversation without the user's message number ``n_turns + 1`` and all that follows."""
    indices = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    end = indices[n_turns] if len(indices) > n_turns else len(conversation.messages)
    return Conversation(conversation.messages[:end])


_OPENING = (
    "You run errands with these tools. When one is needed, answer with its call alone, as JSON with name and "
    "arguments; when its result has come, answer the user in one sentence."
)


class ToolTurn(msgspec.Struct, frozen=True):
    """One user message with its tool call, the tool's result and the answer."""

    user: str
    call: str
    """The assistant's tool call, as JSON."""
    result: str
    """The tool's result, as JSON."""
    answer: str
    """The assistant's answer to the user."""


class ToolTask(msgspec.Struct, frozen=True):
    """A conversation with tool calls.

    Each turn has four messages: user, assistant (the call), tool (the result), assistant (the answer).
    """

    system: str
    turns: tuple[ToolTurn, ...]


class Tool(NamedTuple):
    """A tool and a generator of turns that need it."""

    line: str
    """The tool's description in the system prompt."""
    generate: Callable[[random.Random], ToolTurn]


def generate_tool_tasks(seed: int, n_turns: int) -> Iterator[ToolTask]:
    """Yields endless conversations of ``n_turns`` turns; equal arguments give equal conversations."""
    rng = random.Random(f"{seed} {n_turns}")
    while True:
        tools = rng.choice(_TOOL_SETS)
        system = "\n".join([_OPENING, *(f"- {tool.line}" for tool in tools)])
        yield ToolTask(system, tuple(rng.choice(tools).generate(rng) for _ in range(n_turns)))


def tool_task_messages(task: ToolTask) -> list[dict[str, str]]:
    """Returns the whole conversation as chat messages."""
    messages = [{"role": "system", "content": task.system}]
    for turn in task.turns:
        messages += [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.call},
            {"role": "tool", "content": turn.result},
            {"role": "assistant", "content": turn.answer},
        ]
    return messages


def call_json(name: str, arguments: Mapping[str, str | int]) -> str:
    """Returns a tool call as JSON, as the model writes it."""
    return json.dumps({"name": name, "arguments": arguments})


def _weather(rng: random.Random) -> ToolTurn:
    town, day, degrees = rng.choice(TOWNS), rng.choice(DAYS), rng.randint(1, 39)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))
    return ToolTurn(
        rng.choice((f"What will the weather be in {town} on {day}?", f"How is the weather on {day} in {town}?")),
        call_json("get_weather", {"town": town, "day": day}),
        json.dumps({"sky": sky, "degrees": degrees}),
        f"On {day} it will be {sky} in {town}, with {degrees} degrees.",
    )


def _alarm(rng: random.Random) -> ToolTurn:
    time, day = f"{rng.randint(5, 12)}:{rng.choice(('00', '15', '30', '45'))}", rng.choice(DAYS)
    number = rng.randint(10, 99)
    return ToolTurn(
        rng.choice((f"Wake me at {time} on {day}.", f"Please set an alarm for {day} at {time}.")),
        call_json("set_alarm", {"day": day, "time": time}),
        json.dumps({"alarm": number}),
        f"Alarm {number} is set for {day} at {time}.",
    )


def _message(rng: random.Random) -> ToolTurn:
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    text = rng.choice(
        (f"See you on {day}", f"The {rng.choice(FOODS)} is ready", f"I have the {rng.choice(THINGS)}")
    )
    minute = rng.randint(10, 59)
    return ToolTurn(
        rng.choice((f'Send {name} the message "{text}".', f'Tell {name} "{text}", please.')),
        call_json("send_message", {"to": name, "text": text}),
        json.dumps({"sent": f"12:{minute}"}),
        f"The message to {name} was sent at 12:{minute}.",
    )


def _stock(rng: random.Random) -> ToolTurn:
    goods, street, count = rng.choice(GOODS), rng.choice(STREETS), rng.randint(2, 99)
    return ToolTurn(
        rng.choice(
            (f"How many {goods} are in the shop in {street} Street?", f"Count the {goods} in {street} Street.")
        ),
        call_json("count_stock", {"item": goods, "street": street}),
        json.dumps({"count": count}),
        f"The shop in {street} Street has {count} {goods}.",
    )


def _order(rng: random.Random) -> ToolTurn:
    goods, count, number = rng.choice(GOODS), rng.randint(2, 99), rng.randint(1000, 9999)
    return ToolTurn(
        rng.choice((f"Order {count} {goods}.", f"We need {count} {goods}, please order them.")),
        call_json("order", {"item": goods, "count": count}),
        json.dumps({"order": number}),
        f"The {count} {goods} are ordered; the number of the order is {number}.",
    )


def _light(rng: random.Random) -> ToolTurn:
    corner, state = rng.choice(CORNERS), rng.choice(("on", "off"))
    return ToolTurn(
        rng.choice((f"Turn the light in the {corner} {state}.", f"Light {state} in the {corner}, please.")),
        call_json("set_light", {"room": corner, "state": state}),
        json.dumps({"done": True}),
        f"The light in the {corner} is {state} now.",
    )


def _heating(rng: random.Random) -> ToolTurn:
    corner, degrees, minutes = rng.choice(CORNERS), rng.randint(12, 28), rng.randint(5, 60)
    return ToolTurn(
        rng.choice((f"Heat the {corner} to {degrees} degrees.", f"I want {degrees} degrees in the {corner}.")),
        call_json("set_heating", {"room": corner, "degrees": degrees}),
        json.dumps({"minutes": minutes}),
        f"The {corner} will have {degrees} degrees in {minutes} minutes.",
    )


def _train(rng: random.Random) -> ToolTurn:
    one, two = rng.sample(TOWNS, 2)
    day, time, platform = rng.choice(DAYS), f"{rng.randint(6, 22)}:{rng.randint(10, 59)}", rng.randint(1, 12)
    return ToolTurn(
        rng.choice(
            (
                f"When does the first train from {one} to {two} leave on {day}?",
                f"Find a train to {two} from {one} on {day}.",
            )
        ),
        call_json("find_train", {"from": one, "to": two, "day": day}),
        json.dumps({"time": time, "platform": platform}),
        f"The train from {one} to {two} leaves at {time} from platform {platform}.",
    )


_WEATHER = Tool("get_weather(town, day): the weather of a day", _weather)
_ALARM = Tool("set_alarm(day, time): wakes the user", _alarm)
_MESSAGE = Tool("send_message(to, text): sends a message to a person", _message)
_STOCK = Tool("count_stock(item, street): how many of an item a shop has", _stock)
_ORDER = Tool("order(item, count): orders goods", _order)
_LIGHT = Tool("set_light(room, state): turns a light on or off", _light)
_HEATING = Tool("set_heating(room, degrees): heats a room", _heating)
_TRAIN = Tool("find_train(from, to, day): the first train of a day", _train)

_TOOL_SETS = (
    (_WEATHER, _ALARM, _MESSAGE),
    (_STOCK, _ORDER, _MESSAGE),
    (_LIGHT, _HEATING, _ALARM),
    (_TRAIN, _WEATHER, _MESSAGE),
)
"""The sets of tools that the system prompts list."""
