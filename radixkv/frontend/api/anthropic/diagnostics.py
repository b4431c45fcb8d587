"""Anthropic's cache diagnostics: what of a request is compared, and the field of the message."""

from __future__ import annotations

from typing import Any

from radixkv.frontend.answers import SingleAnswer
from radixkv.frontend.api.anthropic.schema import MessagesRequest
from radixkv.frontend.cache_diagnostics.comparison import INVOCATION, MESSAGES, Verdict
from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.frontend.chat import Chat
from radixkv.frontend.served_model import ServedModel

_REASONS = ("model", "system", "tools", "messages")
"""Parts whose change has a reason of its own."""


def message_id(answer: SingleAnswer) -> str:
    """Returns the id of the message with this answer."""
    return f"msg_{answer.id}"


def message_fingerprint(
    request: MessagesRequest, chat: Chat, answer: SingleAnswer, served_model: ServedModel
) -> Fingerprint:
    """Returns what a later message can be compared with. Costs what ``Fingerprint.of`` does."""
    n_system = 1 if request.system else 0
    return Fingerprint.of(
        cache_salt=chat.cache_salt,
        adapter=served_model.first_adapter,
        parts={
            "model": served_model.adapter,  # names of equal bytes share pages
            "system": served_model.without_nonces(chat.messages[:n_system]),
            "tools": chat.tools,
            "settings": (chat.tool_choice or "auto", request.thinking, request.output_config),
        },
        messages=served_model.without_nonces(chat.messages[n_system:]),
        key=served_model.key(answer.prompt.tokens),
        page_size=served_model.ready.page_size,
    )


def diagnostics_field(verdict: Verdict | None) -> dict[str, Any] | None:
    """Returns ``diagnostics``: null where nothing was asked, and where nothing has changed."""
    if verdict is None or verdict.outcome == "same":
        return None
    if verdict.outcome == "not_found":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    part = MESSAGES if verdict.part == INVOCATION else verdict.part
    if part not in _REASONS:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return {"cache_miss_reason": {"type": f"{part}_changed", "cache_missed_input_tokens": verdict.n_missed}}
