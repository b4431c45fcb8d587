"""Conversations with made tools: names, parameters and results that must be copied from the prompt."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from radixkv.lab.bench.workloads.chat import generate_chats
from training.chat_format import Conversation, Message
from training.made_values import (
    Schema,
    Value,
    field_names,
    field_schema,
    listed,
    made_word,
    scalar_schema,
    spoken,
    thing_name,
    told,
    value_of,
)

HELD_OUT_SHARE = 10
"""One in this many pairs of verb and noun is never the name of a tool in training."""
SYSTEMS = (
    "You are a helpful assistant.",
    "Use your tools.",
    "Answer from what your tools say.",
    "Be brief.",
    "",
    "",
)
_VERBS = (
    "get find set book order send check move open close start stop count read write print lock paint rent sell "
    "buy fix clean track show list add update search plan look_up create cancel compare"
).split()
_QUESTION_VERBS = ("get", "find", "check", "read", "show", "look_up", "search")
"""Verbs of tools that a question may ask for."""


class MadeTool(NamedTuple):
    """A tool with a random name, random parameters and random fields of its results."""

    verb: str
    noun: str
    name: str
    definition: Mapping[str, Any]
    """The tool in OpenAI's format."""
    fields: Mapping[str, Schema]
    """The fields of a result; none: a call returns a value without name, or that it is done."""
    is_done_only: bool
    """Whether a call without fields returns only that it is done."""

    @property
    def purpose(self) -> str:
        """What the tool does, in the imperative."""
        return f"{spoken(self.verb)} the {self.noun}"


class MadeCall(NamedTuple):
    """A call of a made tool."""

    tool: MadeTool
    arguments: Mapping[str, Any]
    request: str
    """The user's sentence that asks for the call."""
    result: str
    """The content of the message with the result."""
    answer: str
    """The assistant's sentence about the result."""
    found: Mapping[str, Any]
    """The result's values by field."""

    @property
    def entry(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls``."""
        function = {"name": self.tool.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": "call", "type": "function", "function": function}


def generate_made_tasks(seed: int, n_requests: int, *, is_held_out: bool = True) -> Iterator[Conversation]:
    """Yields endless conversations with made tools; equal arguments give equal conversations.

    Args:
        seed: any integer.
        n_requests: user messages of each conversation.
        is_held_out: whether the tools are those that training leaves out, or the others.
    """
    rng = random.Random(f"made {seed} {n_requests} {is_held_out}")
    while True:
        tools = _draw_tools(rng, rng.choice((1, 2, 3, 3, 3, 4)), is_held_out)
        system = rng.choice(SYSTEMS)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index in range(n_requests):
            is_last = index == n_requests - 1
            if not is_last and rng.random() < 0.1:
                user, answer = next(generate_chats(rng.getrandbits(60), 1)).turns[0]
                messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            else:
                messages += _request_messages(rng, tools)
        yield Conversation(messages, [tool.definition for tool in tools])


def _request_messages(rng: random.Random, tools: Sequence[MadeTool]) -> Iterator[Message]:
    """Yields the messages of a request with one call, two or three at once, or two in a row."""
    kind = rng.random()
    if kind < 0.2 and (chained := _chained_calls(rng, tools)):
        steps: list[list[MadeCall]] = [[call] for call in chained]
        user = f"{chained[0].request} Then {_lower_first(chained[1].request)}"
    else:
        chosen = rng.sample(tools, min(len(tools), rng.choice((2, 2, 3)))) if kind > 0.7 else [rng.choice(tools)]
        steps = [[_draw_call(rng, tool) for tool in chosen]]
        user = rng.choice((" ", " Also: ", " And: ")).join(call.request for call in steps[0])
    yield {"role": "user", "content": user}
    for step in steps:
        yield {"role": "assistant", "content": "", "tool_calls": [call.entry for call in step]}
        for call in step:
            yield {"role": "tool", "tool_call_id": "call", "content": call.result}
    yield {"role": "assistant", "content": " ".join(call.answer for step in steps for call in step)}


def _chained_calls(rng: random.Random, tools: Sequence[MadeTool]) -> list[MadeCall]:
    """Returns two calls of which the second needs a text that the first returns; empty: no two tools allow it."""
    for first in rng.sample(tools, len(tools)):
        for second in rng.sample(tools, len(tools)):
            sources, targets = _texts(first.fields), _texts(_parameters(second))
            if first is not second and sources and targets:
                before, source = _draw_call(rng, first), rng.choice(sources)
                bound = Value(before.found[source], f"that {spoken(source)}")
                return [before, _draw_call(rng, second, {rng.choice(targets): bound})]
    return []


def _draw_call(rng: random.Random, tool: MadeTool, bound: Mapping[str, Value] | None = None) -> MadeCall:
    """Returns a call with random arguments and a random result.

    Args:
        rng: draws them.
        tool: the tool.
        bound: values of arguments that are given.
    """
    given = bound or {}
    required = tool.definition["function"]["parameters"]["required"]
    values = {
        name: given.get(name) or value_of(rng, schema)
        for name, schema in _parameters(tool).items()
        if name in required or name in given or rng.random() < 0.5
    }
    arguments = {name: value.value for name, value in values.items()}
    request = _request(rng, tool, values, is_bound=bound is not None)
    found = {name: value_of(rng, schema).value for name, schema in tool.fields.items()}
    if found:
        separators = (",", ":") if rng.random() < 0.2 else None
        result = json.dumps(found, separators=separators)
        facts = listed([f"{spoken(name)} {told(value)}" for name, value in found.items()])
        return MadeCall(tool, arguments, request, result, f"The {tool.noun} has {facts}.", found)
    if tool.is_done_only:
        return MadeCall(tool, arguments, request, '{"done": true}', f"Done: {tool.purpose}.", {})
    text = told(value_of(rng, scalar_schema(rng)).value)
    return MadeCall(tool, arguments, request, text, f"The {tool.noun} is {text}.", {})


def _request(rng: random.Random, tool: MadeTool, values: Mapping[str, Value], *, is_bound: bool) -> str:
    """Returns a sentence that asks for a call with these arguments."""
    purpose = f"{tool.purpose[0].upper()}{tool.purpose[1:]}"
    named = [f"{spoken(name)} {value.text}" for name, value in values.items()]
    if not named:
        return rng.choice((f"{purpose}.", f"Please {tool.purpose}."))
    if rng.random() < 0.3:
        rng.shuffle(named)
    if len(values) == 1 and not is_bound and rng.random() < 0.5:
        (value,) = values.values()
        wordings = [f"{purpose} of {value.text}.", f"{purpose} {value.text}.", f"{purpose} for {value.text}."]
        if tool.verb in _QUESTION_VERBS:
            wordings += [f"What is the {tool.noun} of {value.text}?", f"What is the {tool.noun} in {value.text}?"]
        return rng.choice(wordings)
    wordings = [f"{purpose} with {listed(named)}.", f"Please {tool.purpose} with {listed(named)}."]
    if not is_bound:
        wordings += [f"{purpose}: {', '.join(named)}.", f"Call {tool.name} with {listed(named)}."]
    return rng.choice(wordings)


def _draw_tools(rng: random.Random, count: int, is_held_out: bool) -> list[MadeTool]:
    """Returns tools with different nouns; half of the time all have the same verb, or all schemas have extras."""
    verbs = [rng.choice(_VERBS)] if rng.random() < 0.3 else _VERBS
    has_titles, is_closed = rng.random() < 0.2, rng.random() < 0.3
    tools: dict[str, MadeTool] = {}
    while len(tools) < count:
        verb, noun = rng.choice(verbs), thing_name(rng)
        if (zlib.crc32(f"{verb} {noun}".encode()) % HELD_OUT_SHARE == 0) is is_held_out:
            tools[noun] = _draw_tool(rng, verb, noun, has_titles=has_titles, is_closed=is_closed)
    return [*tools.values()]


def _draw_tool(rng: random.Random, verb: str, noun: str, *, has_titles: bool, is_closed: bool) -> MadeTool:
    """Returns a tool of a verb and a noun.

    Args:
        rng: draws everything else.
        verb: the verb.
        noun: the noun.
        has_titles: whether schemas have ``title``, as those that pydantic writes.
        is_closed: whether schemas exclude other properties, as strict ones do.
    """
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_{noun}_{made_word(rng)}", noun))
    n_parameters, n_fields = rng.choice((0, 1, 1, 2, 2, 3, 4)), rng.choice((0, 1, 1, 2, 3))
    parameters = field_names(rng, n_parameters)
    properties: dict[str, Any] = {}
    for parameter in parameters:
        title = {"title": spoken(parameter).title()} if has_titles else {}
        properties[parameter] = {**title, **field_schema(rng)}
    n_required = len(parameters) if is_closed or rng.random() < 0.8 else rng.randint(0, len(parameters))
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": parameters[:n_required]}
    if is_closed:
        schema["additionalProperties"] = False
    purpose = f"{spoken(verb).capitalize()} the {noun}."
    function: dict[str, Any] = {"name": name, "description": purpose, "parameters": schema}
    if rng.random() < 0.15:
        del function["description"]
    if is_closed:
        function["strict"] = True
    definition = {"type": "function", "function": function}
    fields = {field: field_schema(rng) for field in field_names(rng, n_fields)}
    return MadeTool(verb, noun, name, definition, fields, is_done_only=rng.random() < 0.5)


def _parameters(tool: MadeTool) -> Mapping[str, Schema]:
    parameters: Mapping[str, Schema] = tool.definition["function"]["parameters"]["properties"]
    return parameters


def _texts(fields: Mapping[str, Schema]) -> list[str]:
    """Returns the names of the fields that are any text."""
    return [name for name, schema in fields.items() if schema["type"] == "string" and "enum" not in schema]


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]
