"""Recorded conversations, read from a file and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from radixkv.errors import ConfigError, RequestError
from radixkv.lab.bench.session import BenchRequest, Session, Turns
from radixkv.lab.bench.workloads.base import Source, WorkloadSessions, bad_lines, check_enough
from radixkv.lab.bench.workloads.datasets import MESSAGES, Items, read_lines
from radixkv.text.chat_messages import normalize_messages

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


def replay_dataset(
    source: Source, *, num_sessions: int, num_turns: int, output_len: int, max_characters: int
) -> WorkloadSessions:
    """Returns ``replay_sessions`` of the first conversations of the source's data set. O(size).

    Args:
        source: has the data set.
        num_sessions: number of conversations.
        num_turns: user messages of each conversation; it ends before the next one.
        output_len: as in ``replay_sessions``.
        max_characters: as in ``replay_sessions``.

    Raises:
        ConfigError: the data set cannot be read, is too short, or has no request that is short enough.
    """
    assert source.dataset is not None
    read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "conversations", len(read.items), num_sessions, settings="num_sessions")
    truncated = [_truncate(conversation, num_turns) for conversation in read.items[:num_sessions]]
    replayed = replay_sessions(truncated, output_len, max_characters=max_characters)
    counts = {**bad_lines(read.n_bad_lines), **replayed.counts}
    if not replayed.sessions:
        raise ConfigError(
            f"the first {num_sessions} conversations of {source.dataset} have no request to send: "
            f"{counts}; raise num_sessions or max_characters"
        )
    return WorkloadSessions(replayed.sessions, counts)


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


def _truncate(conversation: Conversation, n_turns: int) -> Conversation:
    """Returns the conversation without the user's message number ``n_turns + 1`` and all that follows."""
    indices = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    end = indices[n_turns] if len(indices) > n_turns else len(conversation.messages)
    return Conversation(conversation.messages[:end])


def _fits(conversation: Conversation, end: int, max_characters: int | None) -> bool:
    return (
        max_characters is None or len(msgspec.json.encode(conversation.messages[:end]).decode()) <= max_characters
    )


def _session(conversation: Conversation, ends: list[int], output_len: int) -> Session:
    def turns() -> Turns:
        for end in ends:
            yield (BenchRequest(list(conversation.messages[:end]), output_len),)

    return Session(turns, n_requests=len(ends))
