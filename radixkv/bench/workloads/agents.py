"""Workload of agents that call tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from radixkv.bench.session import BenchRequest, Message, Session, Turns
from radixkv.bench.workloads.base import FixedOutputParameters, Source, WorkloadSessions, bad_lines, check_enough
from radixkv.bench.workloads.conversations import Conversation, read_conversations, replay_sessions
from radixkv.bench.workloads.problems import answer_line, prefix_check, tool_call_check
from radixkv.bench.workloads.templates import Gaps, draw_values
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
    """A tool, and a template of turns that need it."""

    name: str
    parameters: tuple[str, ...]
    """The gaps whose values are the arguments of a call."""
    purpose: str
    """What the tool does, for the system prompt."""
    gaps: Gaps
    users: tuple[str, str]
    """Texts of the user, of which one is chosen."""
    result: tuple[str, ...]
    """The gaps whose values are the tool's result; none: the result is that it is done."""
    answer: str
    """The assistant's answer to the user."""

    @property
    def line(self) -> str:
        """The tool's description in the system prompt."""
        return f"{self.name}({', '.join(self.parameters)}): {self.purpose}"

    def turn(self, rng: random.Random) -> ToolTurn:
        """Returns a turn with random values in the gaps."""
        values = draw_values(rng, {**self.gaps, "user": self.users})
        arguments = {parameter: values[parameter] for parameter in self.parameters}
        result: dict[str, str | int] = {gap: values[gap] for gap in self.result} or {"done": True}
        return ToolTurn(
            user=str(values["user"]),
            call=json.dumps({"name": self.name, "arguments": arguments}),
            result=json.dumps(result),
            answer=self.answer.format_map(values),
        )


def generate_tool_tasks(seed: int, n_turns: int) -> Iterator[ToolTask]:
    """Yields endless conversations of ``n_turns`` turns; equal arguments give equal conversations."""
    rng = random.Random(f"{seed} {n_turns}")
    while True:
        tools = rng.choice(_TOOL_SETS)
        system = "\n".join([_OPENING, *(f"- {tool.line}" for tool in tools)])
        yield ToolTask(system, tuple(rng.choice(tools).turn(rng) for _ in range(n_turns)))


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


_WEATHER = Tool(
    "get_weather",
    ("town", "day"),
    "the weather of a day",
    {
        "town": TOWNS,
        "day": DAYS,
        "degrees": (1, 39),
        "sky": ("sunny", "cloudy", "rainy", "windy", "foggy"),
    },
    ("What will the weather be in {town} on {day}?", "How is the weather on {day} in {town}?"),
    ("sky", "degrees"),
    "On {day} it will be {sky} in {town}, with {degrees} degrees.",
)
_ALARM = Tool(
    "set_alarm",
    ("day", "time"),
    "wakes the user",
    {
        "hour": (5, 12),
        "minute": ("00", "15", "30", "45"),
        "day": DAYS,
        "alarm": (10, 99),
        "time": "{hour}:{minute}",
    },
    ("Wake me at {time} on {day}.", "Please set an alarm for {day} at {time}."),
    ("alarm",),
    "Alarm {alarm} is set for {day} at {time}.",
)
_MESSAGE = Tool(
    "send_message",
    ("to", "text"),
    "sends a message to a person",
    {
        "to": NAMES,
        "day": DAYS,
        "food": FOODS,
        "thing": THINGS,
        "text": ("See you on {day}", "The {food} is ready", "I have the {thing}"),
        "minute": (10, 59),
        "sent": "12:{minute}",
    },
    ('Send {to} the message "{text}".', 'Tell {to} "{text}", please.'),
    ("sent",),
    "The message to {to} was sent at {sent}.",
)
_STOCK = Tool(
    "count_stock",
    ("item", "street"),
    "how many of an item a shop has",
    {"item": GOODS, "street": STREETS, "count": (2, 99)},
    ("How many {item} are in the shop in {street} Street?", "Count the {item} in {street} Street."),
    ("count",),
    "The shop in {street} Street has {count} {item}.",
)
_ORDER = Tool(
    "order",
    ("item", "count"),
    "orders goods",
    {"item": GOODS, "count": (2, 99), "order": (1000, 9999)},
    ("Order {count} {item}.", "We need {count} {item}, please order them."),
    ("order",),
    "The {count} {item} are ordered; the number of the order is {order}.",
)
_LIGHT = Tool(
    "set_light",
    ("room", "state"),
    "turns a light on or off",
    {"room": CORNERS, "state": ("on", "off")},
    ("Turn the light in the {room} {state}.", "Light {state} in the {room}, please."),
    (),
    "The light in the {room} is {state} now.",
)
_HEATING = Tool(
    "set_heating",
    ("room", "degrees"),
    "heats a room",
    {"room": CORNERS, "degrees": (12, 28), "minutes": (5, 60)},
    ("Heat the {room} to {degrees} degrees.", "I want {degrees} degrees in the {room}."),
    ("minutes",),
    "The {room} will have {degrees} degrees in {minutes} minutes.",
)
_TRAIN = Tool(
    "find_train",
    ("from", "to", "day"),
    "the first train of a day",
    {
        ("from", "to"): TOWNS,
        "day": DAYS,
        "hour": (6, 22),
        "minute": (10, 59),
        "time": "{hour}:{minute}",
        "platform": (1, 12),
    },
    (
        "When does the first train from {from} to {to} leave on {day}?",
        "Find a train to {to} from {from} on {day}.",
    ),
    ("time", "platform"),
    "The train from {from} to {to} leaves at {time} from platform {platform}.",
)

_TOOL_SETS = (
    (_WEATHER, _ALARM, _MESSAGE),
    (_STOCK, _ORDER, _MESSAGE),
    (_LIGHT, _HEATING, _ALARM),
    (_TRAIN, _WEATHER, _MESSAGE),
)
"""The sets of tools that the system prompts list."""
