"""What an answer consists of: text, reasoning and calls of tools."""

from __future__ import annotations

import msgspec


class TextPart(msgspec.Struct):
    """Text of the answer itself."""

    text: str


class ReasoningPart(msgspec.Struct):
    """Text that the model wrote before its answer, between the markers of its reasoning."""

    text: str


class ToolCallPart(msgspec.Struct):
    """A call of a tool, or what is new of it. All parts of one call concatenated are the whole call."""

    index: int
    """Position of the call among the choice's calls, from 0."""
    id: str = ""
    """Identifies the call; empty in all parts of a call but its first."""
    name: str = ""
    """The function's name; empty in all parts of a call but its first."""
    arguments: str = ""
    """The arguments as JSON text, or the next piece of it."""


Part = TextPart | ReasoningPart | ToolCallPart


def text_of(part: Part) -> str:
    """Returns the text of a part, or the arguments of a call."""
    return part.arguments if isinstance(part, ToolCallPart) else part.text


def continues(part: Part, last: Part | None) -> bool:
    """Returns whether a part goes on with the last one: both are of one kind and, for calls, of one call."""
    if isinstance(part, ToolCallPart):
        return isinstance(last, ToolCallPart) and last.index == part.index
    return type(part) is type(last)
