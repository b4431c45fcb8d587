"""Replay of recorded conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from radixkv.bench.session import BenchRequest, Session, Turns
from radixkv.bench.workloads.datasets.conversations import Conversation
from radixkv.bench.workloads.source import WorkloadSessions


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
        answers = _answer_indices(conversation)
        fitting = [index for index in answers if _fits(conversation, index, max_characters)]
        counts["too_long"] += len(answers) - len(fitting)
        counts["never_answered"] += not answers
        if fitting:
            sessions.append(_session(conversation, fitting, output_len))
    return WorkloadSessions(sessions, +counts)  # without zeros


def _answer_indices(conversation: Conversation) -> list[int]:
    """Returns the indices of the assistant's messages that follow a message of another role."""
    roles = [message["role"] for message in conversation.messages]
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
