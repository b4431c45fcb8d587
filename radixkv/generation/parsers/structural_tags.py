"""Structural tags of xgrammar, which make an answer's calls obey the request."""

from __future__ import annotations

from typing import Any

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.generation.parsers.formats import CallTag
from radixkv.generation.tools import Tool, ToolUse
from radixkv.structured_outputs import StructuredOutputs

MAX_WHITESPACE_CHARACTERS = 1
"""Most consecutive white space in arguments. With more, a model may write nothing else until its limit, and
templates would render the arguments otherwise in the next turn, which the cache then lacks."""

_THINK, _THINK_END = "<think>", "</think>"
_ANY_OBJECT = {"type": "object"}
_SAYS_TYPE = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keywords of a schema that says itself of which types its values are."""


def structural_tag(
    tag: CallTag,
    tools: ToolUse,
    prompt: str,
    text_format: StructuredOutputs | None = None,
    *,
    has_reasoning: bool,
) -> str:
    """Returns the structural tag of a request as JSON text.

    Where calls are demanded, the answer consists of calls, after reasoning if the model reasons. Where they are not
    and the text has a format, the answer is either calls or that text. Without a format it is free text in which a
    trigger begins a call.

    Args:
        tag: the model's format of calls.
        tools: the tools of the request, of which at least one may be called.
        prompt: the rendered prompt, which may have begun or ended the reasoning.
        text_format: what the answer must match if it is no call; None for any text.
        has_reasoning: whether the model may reason before its answer.
    """
    is_parallel = tools.is_parallel and tag.is_parallel
    calls = [
        _call(tag, tool, is_loose=tools.mode == "auto" and not tool.is_strict) for tool in tools.callable_tools
    ]
    if tools.mode == "auto" and text_format is None:
        found = _free_text(tag, calls, is_parallel=is_parallel)
    else:
        found = _demanded(tag, calls, is_parallel=is_parallel)
        if text_format is not None:
            text = _text_format(text_format)
            # Agents send the format of their last answer with every request, also where they demand calls.
            if tools.mode == "auto":
                found = {"type": "or", "elements": [text, found]}
        if has_reasoning:
            found = _after_reasoning(found, prompt)
    return msgspec.json.encode({"type": "structural_tag", "format": found}).decode()


def _call(tag: CallTag, tool: Tool, *, is_loose: bool) -> dict[str, Any]:
    """Returns one call; a loose one may have any arguments.

    So may any call of a tool that is not strict, if no grammar enforces its schema: ``prepare_source`` finds out.
    """
    # Arguments are an object, also where their schema accepts other values, as {} does.
    says_type = not _SAYS_TYPE.isdisjoint(tool.parameters)
    schema = _ANY_OBJECT if is_loose else {**({} if says_type else _ANY_OBJECT), **tool.parameters}
    content = _schema(schema) | {"style": tag.style}
    if not tool.is_strict:
        content["or_any_object"] = True
    return {"type": "tag", "begin": tag.begin.replace("NAME", tool.name), "content": content, "end": tag.end}


def _list(tag: CallTag, calls: list[dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Returns one or more calls."""
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": tag.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }


def _demanded(tag: CallTag, calls: list[dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Returns one or more calls and nothing else."""
    return _sequence(_text(tag.opening), _list(tag, calls, is_parallel=is_parallel), _text(tag.closing))


def _free_text(tag: CallTag, calls: list[dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Returns free text with calls."""
    if tag.opening:  # the list of calls is itself one tag
        listed = _list(tag, calls, is_parallel=is_parallel)
        calls = [{"type": "tag", "begin": tag.opening, "content": listed, "end": tag.closing}]
        is_parallel = False
    return {
        "type": "triggered_tags",
        "triggers": [tag.trigger],
        "tags": calls,
        "stop_after_first": not is_parallel,
    }


def _after_reasoning(calls: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Returns the calls after the reasoning, which the prompt may have begun or ended."""
    prompt = prompt.rstrip()
    if prompt.endswith(_THINK_END):
        return calls
    is_begun = prompt.endswith(_THINK)
    text = {"type": "any_text", "excludes": [_THINK, _THINK_END]}
    reasoning: dict[str, Any] = _sequence(
        {"type": "tag", "begin": "" if is_begun else _THINK, "content": text, "end": _THINK_END},
        {"type": "regex", "pattern": r"\n{0,2}"},
    )
    return _sequence(reasoning if is_begun else {"type": "optional", "content": reasoning}, calls)


def _text_format(text_format: StructuredOutputs) -> dict[str, Any]:
    """Returns the format of an answer that is no call."""
    match text_format.kind:
        case "json":
            return _schema(msgspec.json.decode(text_format.json or ""))
        case "json_object":
            return _schema(_ANY_OBJECT)
        case "choice":
            return {"type": "or", "elements": [_text(choice) for choice in text_format.choice]}
        case "regex":
            return {"type": "regex", "pattern": text_format.regex}
        case "grammar":
            return {"type": "grammar", "grammar": text_format.grammar}
    raise InvalidRequest("tools and a structural tag exclude each other; leave one out", param="tools")


def _schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE_CHARACTERS}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    """Returns the elements one after the other, without empty texts."""
    shown = [one for one in elements if one.get("value") != ""]
    return shown[0] if len(shown) == 1 else {"type": "sequence", "elements": shown}
