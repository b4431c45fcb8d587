"""Known texts in system messages that differ from request to request and would end every cached prefix there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SYSTEM_ROLES = ("system", "developer")
"""Roles whose messages are searched for nonces."""


class Nonce(NamedTuple):
    """A text that a client writes into system messages for its own service."""

    pattern: re.Pattern[str]
    """The whole text to remove, at the start of a message or of a part of one."""
    client: str
    reason: str
    """Why the text may be removed."""


NONCES = (
    Nonce(
        re.compile(r"x-anthropic-billing-header:[^\n]*\n*"),
        "Claude Code, as the first part of its system prompt, from version 2.1 on",
        "It is for the accounts of Anthropic's servers, and its field cch is new in each request "
        "(github.com/anthropics/claude-code/issues/68900).",
    ),
)
"""The nonces that are removed."""


class NonceFilter:
    """Removes known nonces from the system messages of chats, and counts them."""

    def __init__(self) -> None:
        self.n_removed = 0
        """Nonces removed since the start."""

    def remove(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the messages without nonces, and without messages or parts that were nothing else.

        The messages themselves are not changed. O(messages), and O(characters of nonces).

        Args:
            messages: in OpenAI's format; malformed ones stay as they are.
        """
        kept: list[Mapping[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if message.get("role") not in SYSTEM_ROLES or not isinstance(content, str | list):
                kept.append(message)
                continue
            shorter = self._text(content) if isinstance(content, str) else self._parts(content)
            if shorter == content or shorter:
                kept.append({**message, "content": shorter})
        return kept

    def _parts(self, parts: list[Any]) -> list[Any]:
        kept = []
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            shorter = self._text(text) if isinstance(text, str) else text
            if shorter == text:
                kept.append(part)
            elif shorter:
                kept.append({**part, "text": shorter})
        return kept

    def _text(self, text: str) -> str:
        for nonce in NONCES:
            match = nonce.pattern.match(text)
            if match is not None:
                self.n_removed += 1
                text = text[match.end() :]
        return text
