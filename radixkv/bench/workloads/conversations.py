"""Recorded conversations, read from a file and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.session import BenchRequest, Session, Turns
from radixkv.bench.workloads.base import WorkloadSessions
from radixkv.bench.workloads.datasets import MESSAGES, Items, read_lines
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


class Line(msgspec.Struct, frozen=True):
    """A line of a file of conversations."""

    messages: list[dict[str, Any]] | None = None
    conversations: list[_ShareGPTMessage] | None = None

    def conversation(self) -> Conversation:
        """Returns the line's conversation. Raises ``ValueError`` if it has none or two, or invalid messages."""
        if (self.messages is None) == (self.conversations is None):
            raise ValueError("it must have one of messages and conversations")
        messages = self.messages or [message.message() for message in self.conversations or ()]
        try:
            normalize_messages(messages)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return Conversation(messages)


def read_conversations(path: Path, *, skip_bad_lines: bool = False) -> Items[Conversation]:
    """Reads the conversations of a file, one in a line or all in one JSON array; ignores other fields.

    Raises:
        ConfigError: as ``read_lines``; a line is also bad if its messages are not valid OpenAI messages.
    """
    decoder = msgspec.json.Decoder(Line)
    return read_lines(
        path,
        lambda line: decoder.decode(line).conversation(),
        expected=MESSAGES,
        skip_bad_lines=skip_bad_lines,
    )


def replay_sessions(
    conversations: Iterable[Conversation], output_len: int, *, max_characters: int | None = None
) -> WorkloadSessions:
    """Returns a session for each conversation, with a request for each answer of the assistant.

    A request is sent after the answer to the previous one. Its prompt is the recording up to the assistant's
    message, including the recorded answers, so prompts share what they shared in the recording, whatever the model
    answers. Consecutive assistant messages give one request.

    Args:
        conversations: the recordings.
        output_len: tokens of each answer.
        max_characters: requests whose messages are longer as JSON are left out. None: no limit.

    Returns:
        The sessions, with the number of requests that were ``too_long`` and of conversations that were
        ``never_answered``.
    """
    counts = Counter[str]()
    sessions = []
    for conversation in conversations:
        answers = answer_indices(conversation.messages)
        fitting = [index for index in answers if _fits(conversation, index, max_characters)]
        counts["too_long"] += len(answers) - len(fitting)
        counts["never_answered"] += not answers
        if fitting:
            sessions.append(_session(conversation, fitting, output_len))
    return WorkloadSessions(sessions, +counts)  # without zeros


def answer_indices(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the indices of the assistant's messages that follow a message of another role."""
    roles = [message["role"] for message in messages]
    return [index for index, (before, role) in enumerate(pairwise(roles), 1) if role == "assistant" != before]


def _fits(conversation: Conversation, end: int, max_characters: int | None) -> bool:
    return (
        max_characters is None or len(msgspec.json.encode(conversation.messages[:end]).decode()) <= max_characters
    )


def _session(conversation: Conversation, ends: list[int], output_len: int) -> Session:
    def turns() -> Turns:
        for end in ends:
            yield (BenchRequest(list(conversation.messages[:end]), output_len),)

    return Session(turns, n_requests=len(ends))
