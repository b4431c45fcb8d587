"""Checks of chat messages, and their conversion to one form for all clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened

_MEDIA = ("image", "images", "image_url", "input_audio", "audio", "audio_url", "video", "videos", "video_url")
"""Fields of messages and of their parts that clients send for more than text; Ollama's messages have ``images``."""


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages for ``ChatTemplate.render``.

    The content is one text; that of a message with calls may also be null. Arguments of calls are as the client
    sent them, JSON text or an object.

    Args:
        messages: in OpenAI's format; a message's content is a string or a list of text parts.

    Raises:
        InvalidRequest: a message is malformed; the error names it by its index.
    """
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{path}.role must be a text, such as user or assistant")
    if message.get("content") is None and role != "assistant":  # which may have calls of tools instead
        raise _invalid(f"{path}.content is missing; give a text")
    if not isinstance(message.get("name"), str | None):
        raise _invalid(f"{path}.name must be a text")
    _check_text_only(message, path)
    plain = {**message, "content": _content(message.get("content"), f"{path}.content")}
    if calls := plain.pop("tool_calls", None):  # templates ask whether there is such a key
        plain["tool_calls"] = _calls(calls, f"{path}.tool_calls")
        if message.get("content") is None:
            plain["content"] = None
    reasoning = plain.pop("reasoning_content", None) or plain.pop("reasoning", None)
    if not isinstance(reasoning, str | None):
        raise _invalid(f"{path}.reasoning_content must be a text")
    if reasoning:
        plain["reasoning_content"] = reasoning
    return plain


def _content(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{path} must be a text, or a list of parts of type text")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedFeature(
            f"{path} is of type {shortened(kind)}; this release supports text only", param="messages"
        )
    text = part.get("text") if isinstance(part, dict) else None
    if kind is None or not isinstance(text, str):
        raise _invalid(f'{path} must be {{"type": "text", "text": ...}} with a text')
    assert isinstance(part, dict), "it has a text"
    _check_text_only(part, path)
    return text


def _check_text_only(fields: Mapping[str, Any], path: str) -> None:
    for name in _MEDIA:
        if fields.get(name):
            raise UnsupportedFeature(f"{path} has {name}; this release supports text only", param="messages")


def _calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(f"{path} must be a list")
    return [_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _invalid(f"{path} must have a function")
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = "{}"
    if isinstance(arguments, str):
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            raise _invalid(f"{path}.function.arguments is not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, param="messages")
