"""The form in which a chat template reads the calls of a conversation's history, found by rendering probes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Mapping[str, Any]], str | None]
"""Renders messages with variables; returns None if the template refuses them."""

_NAME, _VALUE = "probe_function", "probed value"
_ARGUMENTS = {"probed": _VALUE}
_AS_JSON = json.dumps(_ARGUMENTS)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "other_function",
        "description": "a function",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a text"}}},
    },
}


@dataclass(frozen=True)
class CallForm:
    """How a template reads an assistant's message with calls."""

    has_text_arguments: bool = False
    """Whether arguments are JSON text, as clients send them; otherwise they are objects."""
    null_content: str | None = ""
    """What stands for a content that is null."""
    empty_content: str | None = ""
    """What stands for an empty content."""

    def apply(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Returns messages in this form. O(length of the calls).

        Args:
            messages: as ``normalize_messages`` returns them; arguments may be text or objects.
        """
        return [self._apply(message) if message.get("tool_calls") else message for message in messages]

    def _apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not content:
            content = self.null_content if content is None else self.empty_content
        return {**message, "content": content, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) != self.has_text_arguments:
            is_text = self.has_text_arguments
            arguments = json.dumps(arguments, ensure_ascii=False) if is_text else json.loads(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}


def find_call_form(render: Render) -> CallForm:
    """Returns the form in which a template shows calls.

    Objects are preferred to texts, which some templates would encode a second time. A null or empty content stays
    as the client sent it if the calls are shown then.

    Cost: up to 16 renderings of three messages.
    """
    for has_result, has_tools in product((True, False), (True, False)):
        variables = {"tools": [_TOOL]} if has_tools else {}
        texts = {
            (is_text, content): render(_probe(content, arguments, has_result=has_result), variables) or ""
            for is_text, arguments in ((False, _ARGUMENTS), (True, _AS_JSON))
            for content in (None, "")
        }
        shown = {form for form, text in texts.items() if _shows_call(text, has_text_arguments=form[0])}
        if shown:
            return _form(shown, texts)
    return CallForm()


def _form(shown: set[tuple[bool, str | None]], texts: Mapping[tuple[bool, str | None], str]) -> CallForm:
    is_text = all(is_text for is_text, _ in shown)
    # Many templates write null as None. So would Transformers, but no model was trained on that.
    writes_none = texts[is_text, None].count("None") > texts[is_text, ""].count("None")
    reads_null, reads_empty = (is_text, None) in shown and not writes_none, (is_text, "") in shown
    return CallForm(
        is_text,
        null_content=None if reads_null else "",
        empty_content=None if reads_null and not reads_empty else "",
    )


def _shows_call(text: str, *, has_text_arguments: bool) -> bool:
    """Returns whether a text has the probe's call, with arguments that are neither encoded twice nor Python's."""
    is_whole = _NAME in text and _VALUE in text
    return is_whole and (_AS_JSON in text if has_text_arguments else str(_ARGUMENTS) not in text)


def _probe(content: str | None, arguments: object, *, has_result: bool) -> list[dict[str, Any]]:
    """Returns a conversation with a call, whose id is one that all templates take."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    if has_result:
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": _NAME, "content": "b"})
    return messages
