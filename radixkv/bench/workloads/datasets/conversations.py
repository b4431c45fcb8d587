"""Reading of recorded conversations in OpenAI's or ShareGPT's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.workloads.datasets.formats import MESSAGES
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.errors import RequestError
from radixkv.text.messages import normalize_messages

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
"""OpenAI's role for each speaker in ShareGPT's format."""


class Conversation(msgspec.Struct, frozen=True):
    """A recorded conversation."""

    messages: list[dict[str, Any]]
    """Messages in OpenAI's format, with all their fields."""


class _ShareGPTMessage(msgspec.Struct, frozen=True):
    """A message in ShareGPT's format."""

    speaker: str = msgspec.field(name="from")
    value: str

    def message(self) -> dict[str, Any]:
        role = ROLES.get(self.speaker.lower())
        if role is None:
            raise ValueError(f"from {self.speaker!r} is none of {', '.join(ROLES)}")
        return {"role": role, "content": self.value}


class _Line(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]] | None = None
    conversations: list[_ShareGPTMessage] | None = None

    def conversation(self) -> Conversation:
        if (self.messages is None) == (self.conversations is None):
            raise ValueError("it must have one of messages and conversations")
        if self.messages is not None:
            return Conversation(self.messages)
        return Conversation([message.message() for message in self.conversations or ()])


def read_conversations(path: Path, *, skip_bad_lines: bool = False) -> Items[Conversation]:
    """Reads the conversations of a file, one in a line or all in one JSON array; ignores other fields.

    Raises:
        ConfigError: as ``read_lines``; a line is also bad if its messages are not valid OpenAI messages.
    """
    decoder = msgspec.json.Decoder(_Line)

    def convert(line: bytes) -> Conversation:
        conversation = decoder.decode(line).conversation()
        try:
            normalize_messages(conversation.messages)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return conversation

    return read_lines(path, convert, expected=MESSAGES, skip_bad_lines=skip_bad_lines)
