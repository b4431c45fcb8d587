"""The items of a response's ``output``, and the events that tell a client how they grow."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterator
from typing import Any

from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart, continues, text_of

Event = dict[str, Any]

_SEAL = "radixkv:"
"""Marks the ``encrypted_content`` that this server wrote: that of other servers cannot be read."""


class OutputItems:
    """Builds the items from the parts of an answer, in whatever pieces these come.

    Args:
        seals_reasoning: whether reasoning items have ``encrypted_content``.
    """

    def __init__(self, *, seals_reasoning: bool) -> None:
        self.items: list[dict[str, Any]] = []
        """The items so far."""
        self._seals_reasoning = seals_reasoning
        self._open: Part | None = None
        """A part of the last item, while that may grow."""
        self._pieces: list[str] = []
        """The texts or arguments of the last item."""

    def add(self, part: Part) -> Iterator[Event]:
        """Adds a part or a piece of one; yields its events, without sequence numbers."""
        if not continues(part, self._open):
            yield from self.end("completed")
            self._open, self._pieces = part, []
            self.items.append(_new_item(part))
            yield {"type": "response.output_item.added", **self._where(), "item": dict(self.items[-1])}
            if (content := _content(part, "")) is not None:
                yield {"type": "response.content_part.added", **self._place(), "part": content}
        if piece := text_of(part):
            self._pieces.append(piece)
            yield self._delta(part, piece)

    def end(self, status: str) -> Iterator[Event]:
        """Ends the last item, if it is open; yields its events.

        Args:
            status: ``completed``, or ``incomplete`` if the answer was cut.
        """
        part, item, text = self._open, self.items[-1] if self.items else {}, "".join(self._pieces)
        if part is None:
            return
        self._open = None
        item["status"] = status
        match part:
            case ToolCallPart():
                item["arguments"] = text
                done = {"type": "response.function_call_arguments.done", **self._where(), "item_id": item["id"]}
                yield {**done, "name": item["name"], "arguments": text}
            case TextPart():
                yield {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []}
            case ReasoningPart():
                if self._seals_reasoning:
                    item["encrypted_content"] = sealed_reasoning(text)
                yield {"type": "response.reasoning_text.done", **self._place(), "text": text}
        if (content := _content(part, text)) is not None:
            item["content"] = [content]
            yield {"type": "response.content_part.done", **self._place(), "part": content}
        yield {"type": "response.output_item.done", **self._where(), "item": item}

    def _delta(self, part: Part, piece: str) -> Event:
        match part:
            case ToolCallPart():
                where = {**self._where(), "item_id": self.items[-1]["id"]}
                return {"type": "response.function_call_arguments.delta", **where, "delta": piece}
            case TextPart():
                return {"type": "response.output_text.delta", **self._place(), "delta": piece, "logprobs": []}
            case ReasoningPart():
                return {"type": "response.reasoning_text.delta", **self._place(), "delta": piece}

    def _where(self) -> Event:
        return {"output_index": len(self.items) - 1}

    def _place(self) -> Event:
        return {**self._where(), "item_id": self.items[-1]["id"], "content_index": 0}


def _new_item(part: Part) -> dict[str, Any]:
    item: dict[str, Any] = {"status": "in_progress"}
    match part:
        case ToolCallPart():
            return {
                "id": f"fc_{uuid.uuid4().hex}",
                "type": "function_call",
                "call_id": part.id,
                "name": part.name,
                "arguments": "",
                **item,
            }
        case TextPart():
            return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": [], **item}
        case ReasoningPart():
            return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": [], **item}


def _content(part: Part, text: str) -> dict[str, Any] | None:
    """Returns the content part of an item; None for a call, which has none."""
    match part:
        case ToolCallPart():
            return None
        case TextPart():
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        case ReasoningPart():
            return {"type": "reasoning_text", "text": text}


def sealed_reasoning(text: str) -> str:
    """Returns reasoning as ``encrypted_content``. It is encoded and not encrypted: the client may see it anyway."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed_reasoning(content: object) -> str:
    """Returns the reasoning of an ``encrypted_content``; empty if this server did not write it."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
