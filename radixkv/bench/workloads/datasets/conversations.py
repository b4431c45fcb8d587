"""Recorded conversations: files of OpenAI messages, and files of ShareGPT's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.workloads.datasets.formats import MESSAGES
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.errors import RequestError
from radixkv.text.messages import plain_messages

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Who speaks in files of ShareGPT's kind, and OpenAI's role for it."""


class Conversation(msgspec.Struct, frozen=True):
    """What was said, in order."""

    messages: list[dict[str, Any]]
    """OpenAI's, as a server takes them; with all their fields."""


class _Said(msgspec.Struct, frozen=True):
    """A message of ShareGPT's."""

    speaker: str = msgspec.field(name="from")
    value: str

    def message(self) -> dict[str, Any]:
        role = ROLES.get(self.speaker.lower())
        if role is None:
            raise ValueError(f"from {self.speaker!r} is none of {', '.join(ROLES)}")
        return {"role": role, "content": self.value}


class _Line(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]] | None = None
    conversations: list[_Said] | None = None

    def conversation(self) -> Conversation:
        if (self.messages is None) == (self.conversations is None):
            raise ValueError("it must have one of messages and conversations")
        if self.messages is not None:
            return Conversation(self.messages)
        return Conversation([said.message() for said in self.conversations or ()])


def read_conversations(path: Path, *, skip_bad_lines: bool = False) -> Items[Conversation]:
    """The conversations of a file: one a line, or all in one JSON array. Fields beside the messages are ignored.

    Raises:
        ConfigError: as ``read_lines``; messages that no server takes count as faults.
    """
    decoder = msgspec.json.Decoder(_Line)

    def convert(line: bytes) -> Conversation:
        conversation = decoder.decode(line).conversation()
        try:
            plain_messages(conversation.messages)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return conversation

    return read_lines(path, convert, wanted=MESSAGES, skip_bad_lines=skip_bad_lines)
