"""Structural tags of xgrammar, which make an answer's calls and text obey the request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.generation.parsers.formats import CallTag, ReasoningTag
from radixkv.generation.tools import Tool, ToolUse
from radixkv.wire.structured_outputs import StructuredOutputs, choice_grammar

MAX_WHITESPACE_CHARACTERS = 1
"""Most consecutive white space in arguments. With more, a model may write nothing else until its limit, and
templates would render the arguments otherwise in the next turn, which the cache then lacks."""

Stage = Literal["awaited", "open", "closed", "absent"]
"""Where the prompt leaves the reasoning: it may begin, has begun, has ended, or cannot come any more."""

_MARK = re.compile(r"(<[^<>\s]+>)")
_ANY_OBJECT = {"type": "object"}
_SAYS_TYPE = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keywords of a schema that says itself of which types its values are."""

Format = dict[str, Any]
"""A format of xgrammar, or one with the further keys that ``prepare_source`` reads."""


class StructuralTags:
    """Makes the structural tags of a model's requests.

    Args:
        calls: the model's format of calls; None if no calls are asked for.
        reasoning: the model's format of reasoning; None if it does not reason.
        mark_ids: the ids of those of the formats' marks that are special tokens.
    """

    def __init__(self, calls: CallTag | None, reasoning: ReasoningTag | None, mark_ids: Mapping[str, int]) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._mark_ids = mark_ids

    def make(self, tools: ToolUse, text_format: StructuredOutputs | None, stage: Stage) -> str:
        """Returns the structural tag of a request as JSON text.

        Where calls are demanded, the answer consists of calls, after reasoning if the model reasons. Where they are
        not and the text has a format, the answer is either calls or that text, also after reasoning. Without a
        format it is free text in which a trigger begins a call.

        Args:
            tools: the tools of the request.
            text_format: what the answer must match if it is no call; None for any text.
            stage: where the prompt leaves the reasoning.

        Raises:
            InvalidRequest: the text's format is a structural tag that cannot stand beside tools, or is malformed.
        """
        if tools.mode != "none" and text_format is not None and text_format.structural_tag:
            raise InvalidRequest("tools and a structural tag exclude each other; leave one out", param="tools")
        tag = self._calls
        if tag is not None and tag.trigger and tools.mode == "auto" and text_format is None:
            found = self._free_text(tag, tools)
            return _encode({"type": "structural_tag", "format": found})
        choices = []
        # Agents send the format of their last answer with every request, also where they demand calls.
        if tools.mode != "required":
            text = {"type": "any_text"} if text_format is None else _text_format(text_format)
            choices.append(_sequence(self._text_begin(stage), text))
        if tag is not None and tools.mode != "none":
            choices.append(_sequence(self._calls_begin(stage), self._demanded(tag, tools)))
        found = {"type": "structural_tag", "format": _any_of(choices)}
        if (before := self._before(stage)) is not None:
            found["before"] = before
        return _encode(found)

    def _before(self, stage: Stage) -> Format | None:
        """Returns the reasoning, which the prompt may have begun or ended; None if it cannot come."""
        tag = self._reasoning
        if tag is None or stage == "absent":
            return None
        space: Format = {"type": "regex", "pattern": r"\n{0,2}"}
        rest = _sequence(
            self._any_text_before(tag.end),
            self._literal(tag.end),
            self._literal(tag.next_message) if tag.next_message else space,
        )
        whole = _sequence(_text("") if tag.next_message else space, self._literal(tag.begin), rest)
        more: Format = {"type": "star" if tag.next_message else "optional", "content": whole}
        match stage:
            case "awaited":
                return more
            case "open":
                return _sequence(rest, more) if tag.next_message else rest
        if not tag.next_message:
            return None
        return _sequence({"type": "optional", "content": self._literal(tag.next_message)}, more)

    def _any_text_before(self, end: str) -> Format:
        if end in self._mark_ids:
            return {"type": "any_tokens", "exclude_tokens": sorted(self._mark_ids.values())}
        return {"type": "any_text", "excludes": [end]}

    def _text_begin(self, stage: Stage) -> Format:
        if self._reasoning is None or stage == "absent":
            return _text("")
        return _any_of([self._literal(text) for text in self._reasoning.text_begin])

    def _calls_begin(self, stage: Stage) -> Format:
        tag = self._reasoning
        if tag is None or not tag.next_message or stage != "absent":
            return _text("")
        return self._literal(tag.end + tag.next_message)  # ends the text that the prompt has begun

    def _demanded(self, tag: CallTag, tools: ToolUse) -> Format:
        """Returns one or more calls and nothing else."""
        return _sequence(_text(tag.opening), self._list(tag, tools), _text(tag.closing))

    def _free_text(self, tag: CallTag, tools: ToolUse) -> Format:
        """Returns free text with calls."""
        calls, is_parallel = self._call_list(tag, tools), tools.is_parallel and tag.is_parallel
        if tag.opening:  # the list of calls is itself one tag
            calls = [{"type": "tag", "begin": tag.opening, "content": self._list(tag, tools), "end": tag.closing}]
            is_parallel = False
        trigger = self._mark_ids.get(tag.trigger)
        kind: Format = (
            {"type": "triggered_tags", "triggers": [tag.trigger]}
            if trigger is None
            else {"type": "token_triggered_tags", "trigger_tokens": [trigger]}
        )
        return kind | {"tags": calls, "stop_after_first": not is_parallel}

    def _list(self, tag: CallTag, tools: ToolUse) -> Format:
        """Returns one or more calls."""
        if not tag.is_parallel:
            return _any_of(self._call_list(tag, tools))
        return {
            "type": "tags_with_separator",
            "tags": self._call_list(tag, tools),
            "separator": tag.separator,
            "at_least_one": True,
            "stop_after_first": not tools.is_parallel,
        }

    def _call_list(self, tag: CallTag, tools: ToolUse) -> list[Format]:
        return [
            self._call(tag, tool, is_loose=tools.mode == "auto" and not tool.is_strict)
            for tool in tools.callable_tools
        ]

    def _call(self, tag: CallTag, tool: Tool, *, is_loose: bool) -> Format:
        """Returns one call; a loose one may have any arguments.

        A call of a tool that is not strict may also have any arguments if no grammar can enforce its schema:
        ``prepare_source`` finds out.
        """
        # Arguments are an object, also where their schema accepts other values, as {} does.
        says_type = not _SAYS_TYPE.isdisjoint(tool.parameters)
        schema = _ANY_OBJECT if is_loose else {**({} if says_type else _ANY_OBJECT), **tool.parameters}
        content = {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": MAX_WHITESPACE_CHARACTERS,
            "style": tag.style,
        }
        if not tool.is_strict:
            content["or_any_object"] = True
        begin, end = tag.begin.replace("NAME", tool.name), tag.end
        if (mark := _MARK.match(begin)) is not None and mark[0] in self._mark_ids:
            content = _sequence(self._literal(begin[mark.end() :]), content)
            return {"type": "tag", "begin": self._token(mark[0]), "content": content, "end": self._end(end)}
        return {"type": "tag", "begin": begin, "content": content, "end": self._end(end)}

    def _end(self, text: str) -> Format | str:
        return self._token(text) if text in self._mark_ids else text

    def _token(self, mark: str) -> Format:
        return {"type": "token", "token": self._mark_ids[mark]}

    def _literal(self, text: str) -> Format:
        """Returns a text, whose marks may be special tokens."""
        return _sequence(
            *[self._token(piece) if piece in self._mark_ids else _text(piece) for piece in _MARK.split(text)]
        )


def _text_format(text_format: StructuredOutputs) -> Format:
    """Returns the format of an answer that is no call."""
    match text_format.kind:
        case "json":
            return _one_line(_decode(text_format.json or "", "the JSON schema"))
        case "json_object":
            return _one_line(_ANY_OBJECT)
        case "choice":
            return {"type": "grammar", "grammar": choice_grammar(text_format.choice)}
        case "regex":
            return {"type": "regex", "pattern": text_format.regex}
        case "grammar":
            return {"type": "grammar", "grammar": text_format.grammar}
    match _decode(text_format.structural_tag or "", "the structural tag"):
        case {"format": dict() as own}:
            return own
        case {"structures": [*structures], "triggers": triggers} if all(
            isinstance(one, dict) for one in structures
        ):
            tags = [
                {
                    "type": "tag",
                    "begin": one.get("begin"),
                    "content": {"type": "json_schema", "json_schema": one.get("schema")},
                    "end": one.get("end"),
                }
                for one in structures
            ]
            return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    raise InvalidRequest("the structural tag has no format", param="structured_outputs")


def _decode(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}", param="structured_outputs") from None


def _encode(tag: Format) -> str:
    return msgspec.json.encode(tag).decode()


def _one_line(schema: object) -> Format:
    return {"type": "json_schema", "json_schema": schema, "is_one_line": True}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _any_of(choices: list[Format]) -> Format:
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}


def _sequence(*elements: Format) -> Format:
    """Returns the elements one after the other, without empty texts."""
    shown = [one for one in elements if one.get("value") != ""] or [_text("")]
    return shown[0] if len(shown) == 1 else {"type": "sequence", "elements": shown}
