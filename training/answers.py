"""Checks of the model's answers in chats: reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from training.chat_format import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, Message

_REASONING = re.compile(f"{THINK}\n(.+?)\n{END_THINK}\n\n", re.DOTALL)
_CALL = re.compile(f"{TOOL_CALL}\n(.*?)\n{END_TOOL_CALL}", re.DOTALL)

Check = Callable[[str], bool]
"""Returns whether an answer's text is right."""


class Answer(NamedTuple):
    """An answer, taken apart."""

    has_reasoning: bool
    content: str
    calls: list[object]
    """The calls as values of JSON."""


def read_answer(text: str) -> Answer:
    """Takes an answer's text apart. Raises ``ValueError`` if a call is no JSON."""
    reasoning = _REASONING.match(text)
    rest = text[reasoning.end() :] if reasoning else text
    calls = [json.loads(call) for call in _CALL.findall(rest)]
    return Answer(reasoning is not None, _CALL.sub("", rest).strip(), calls)


def answers_like(message: Message) -> Check:
    """Returns a check for the content and the calls of a message, and for some reasoning if the message has any."""
    calls: list[Any] = [call["function"] for call in message.get("tool_calls", ())]
    expected = Answer(
        "reasoning_content" in message,
        message["content"],
        [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls],
    )

    def is_right(text: str) -> bool:
        try:
            return read_answer(text) == expected
        except (ValueError, RecursionError):
            return False

    return is_right


def is_json(expected: str) -> Check:
    """Returns a check for JSON of the same value."""

    def is_right(text: str) -> bool:
        try:
            return bool(json.loads(text) == json.loads(expected))
        except (ValueError, RecursionError):
            return False

    return is_right
