"""Messages of a chat, as clients write them, to what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.errors import InvalidRequest, UnsupportedFeature

_WITHOUT_CONTENT = ("assistant",)
"""Roles whose messages may be of something else than content."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them: content is one text, arguments of calls are objects.

    Args:
        messages: OpenAI's; contents are texts, or lists of parts that are texts.

    Raises:
        InvalidRequest: naming the message that is none.
    """
    return [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{place}.role must be a text, such as user or assistant")
    if message.get("content") is None and role not in _WITHOUT_CONTENT:
        raise _invalid(f"{place}.content is missing; give a text")
    if not isinstance(message.get("name"), str | None):
        raise _invalid(f"{place}.name must be a text")
    plain = {**message, "content": _content(message.get("content"), f"{place}.content")}
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    return plain


def _content(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{place} must be a text, or a list of parts of type text")
    return "\n".join(_part(part, f"{place}[{at}]") for at, part in enumerate(content))


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedFeature(
            f"{place} is not of type text, and others are not supported in this release", param="messages"
        )
    text = part.get("text") if isinstance(part, dict) else None
    if kind is None or not isinstance(text, str):
        raise _invalid(f'{place} must be {{"type": "text", "text": ...}} with a text')
    return text


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(f"{place} must be a list")
    return [_call(call, f"{place}[{at}]") for at, call in enumerate(calls)]


def _call(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _invalid(f"{place} must have a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _invalid(f"{place}.function.arguments is not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, param="messages")
