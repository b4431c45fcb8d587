"""Recorded conversations, asked again turn by turn with their own messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from radixkv.bench.session import Request, Session, Turns
from radixkv.bench.workloads.datasets.conversations import Conversation
from radixkv.bench.workloads.source import Made


def replayed(conversations: Iterable[Conversation], output_len: int, *, max_characters: int | None = None) -> Made:
    """A session a conversation: a request wherever an assistant answered, once the request before is answered.

    A request's prompt is the recording up to there, also the assistant's own messages: whatever the model says, the
    prompts share what they shared in the recording. Of several messages in a row from the assistant, only the first
    is asked for.

    Args:
        conversations: the recordings.
        output_len: tokens of each answer.
        max_characters: requests whose messages are longer, as JSON, are left out.

    Returns:
        The sessions, and how many requests were ``too_long`` and how many conversations were ``never_answered``.
    """
    counts = Counter[str]()
    sessions = []
    for conversation in conversations:
        answered = _answered(conversation)
        fitting = [place for place in answered if _fits(conversation, place, max_characters)]
        counts["too_long"] += len(answered) - len(fitting)
        counts["never_answered"] += not answered
        if fitting:
            sessions.append(_session(conversation, fitting, output_len))
    return Made(sessions, +counts)  # without zeros


def _answered(conversation: Conversation) -> list[int]:
    """Where the assistant answers somebody else's message."""
    roles = [message["role"] for message in conversation.messages]
    return [place for place, (before, role) in enumerate(pairwise(roles), 1) if role == "assistant" != before]


def _fits(conversation: Conversation, place: int, max_characters: int | None) -> bool:
    return (
        max_characters is None or len(msgspec.json.encode(conversation.messages[:place]).decode()) <= max_characters
    )


def _session(conversation: Conversation, places: list[int], output_len: int) -> Session:
    def turns() -> Turns:
        for place in places:
            yield (Request(list(conversation.messages[:place]), output_len),)

    return Session(turns, n_requests=len(places))
