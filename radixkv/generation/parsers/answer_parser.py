"""The parts of one answer, from its text as it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from radixkv.generation.parsers.formats import (
    GEMMA_CALLS,
    REASONING_FIELDS,
    TOOL_FIELD,
    XML_CALLS,
    XML_OPENING,
)
from radixkv.generation.parsers.gemma_calls import GemmaCallReader
from radixkv.generation.parsers.json_calls import CallPiece, JsonCallReader
from radixkv.generation.parsers.part_border import PartWriter
from radixkv.generation.parsers.xml_calls import XmlCallReader
from radixkv.generation.parts import Part, ReasoningPart, TextPart
from radixkv.generation.tools import ToolUse

_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")
_ANSWER_START = r"\A"
"""What a pattern begins with that matches only at the start of an answer."""
_Reader = JsonCallReader | XmlCallReader | GemmaCallReader
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")


@dataclass(frozen=True)
class _Calls:
    """How the field of calls is read."""

    template: ResponseTemplate
    """Reads the text of one region with calls."""
    keys: tuple[str, str] | None
    """The keys of name and arguments, if calls are JSON that is read as it arrives; None to read whole regions."""
    opening: str
    """What begins a region; empty if it is not always the same."""
    closing: str
    """What ends a region; empty if it is not always the same."""
    is_json: bool
    is_xml: bool
    """Whether calls are Qwen3-Coder's XML, which is read as it arrives."""
    is_gemma: bool
    """Whether calls are in Gemma 4's notation, which is read as it arrives."""


@dataclass(frozen=True)
class CompiledTemplate:
    """A response template, ready to parse answers."""

    template: ResponseTemplate
    calls: _Calls | None
    """None if calls are not looked for."""
    has_reasoning: bool
    """Whether reasoning is looked for."""
    mark_starts: Mapping[str, frozenset[str]]
    """The characters that may begin the end of a field's text, for fields whose text has no other end.

    They leave out marks that stand only at the start of an answer. Calls are no text.
    """


def compile_template(
    response_template: Mapping[str, Any], *, has_tools: bool, has_reasoning: bool
) -> CompiledTemplate:
    """Compiles a response template of Transformers.

    Args:
        response_template: the template.
        has_tools: whether to look for calls.
        has_reasoning: whether to look for reasoning.

    Raises:
        ValueError: the template is malformed.
    """
    fields = {
        name: field
        for name, field in response_template["fields"].items()
        if (has_tools or name != TOOL_FIELD) and (has_reasoning or name not in REASONING_FIELDS)
    }
    calls = _compile_calls(response_template, fields[TOOL_FIELD]) if TOOL_FIELD in fields else None
    plain = {name: _plain_field(field) for name, field in fields.items()}
    if calls is not None and calls.is_xml:
        plain[TOOL_FIELD]["open_pattern"] = XML_OPENING
    elif calls is not None and calls.keys is None and not calls.is_gemma:
        plain[TOOL_FIELD] = _captured_field(fields[TOOL_FIELD])
    finds_reasoning = not fields.keys().isdisjoint(REASONING_FIELDS)
    template = load_response_template({**response_template, "fields": plain})
    return CompiledTemplate(template, calls, finds_reasoning, _mark_starts(fields, template.implicit))


def _compile_calls(response_template: Mapping[str, Any], field: Mapping[str, Any]) -> _Calls:
    opening, closing = field.get("open"), field.get("close")
    return _Calls(
        load_response_template({**response_template, "fields": {TOOL_FIELD: field}}),
        _streamed_keys(field),
        opening if isinstance(opening, str) else "",
        closing if isinstance(closing, str) else "",
        field.get("content") == "json",
        field == XML_CALLS,
        field == GEMMA_CALLS,
    )


def _plain_field(field: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a field with the same delimiters whose content is taken as it is."""
    plain = {key: field[key] for key in _DELIMITERS if key in field}
    return plain | {
        "content": "text",
        "content_args": {"strip": False},
        "repeats": True,
        "transform": "{content}",
    }


def _captured_field(field: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain field that also gives the text that began it."""
    plain = _plain_field(field)
    literals = plain.pop("open", [])
    alternatives = [literals] if isinstance(literals, str) else sorted(literals, key=len, reverse=True)
    pattern = plain.get("open_pattern") or "|".join(map(re.escape, alternatives))
    transform = {"opening": "{opening}", "content": "{content}"}
    return plain | {"open_pattern": f"(?P<opening>{pattern})", "transform": transform}


def _mark_starts(fields: Mapping[str, Mapping[str, Any]], implicit: str | None) -> dict[str, frozenset[str]]:
    opens = [_starts(field, "open") for field in fields.values()]
    starts = {
        name: [*opens, _starts(field, "close")] if name == implicit else [_starts(field, "close")]
        for name, field in fields.items()
        if name != TOOL_FIELD
    }
    return {
        name: frozenset().union(*(one for one in parts if one is not None))
        for name, parts in starts.items()
        if None not in parts
    }


def _starts(field: Mapping[str, Any], mark: str) -> frozenset[str] | None:
    """Returns the first characters of a field's marks of one kind, none if it has none; None for any character."""
    pattern = field.get(f"{mark}_pattern")
    if pattern is not None and not (pattern.startswith(_ANSWER_START) and "|" not in pattern):
        return None
    literals = field.get(mark, [])
    return frozenset(one[0] for one in ([literals] if isinstance(literals, str) else literals))


def _streamed_keys(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the keys of name and arguments in a call, if calls are plain JSON objects or lists of them."""
    if field.get("content") != "json" or field.get("content_args"):
        return None
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, Mapping):
        return None
    prefix = "{" if field.get("transform_each") else "{content."
    keys = []
    for placeholder in (function.get("name"), function.get("arguments")):
        found = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
        if found is None or not str(placeholder).startswith(prefix):
            return None
        keys.append(found[1])
    return keys[0], keys[1]


class AnswerParser:
    """Splits the text of one answer into text, reasoning and calls, wherever the text is cut into pieces.

    What looks like a call and cannot be read as one is text, as the model wrote it.

    Args:
        compiled: the response template.
        prompt: the text before the answer, which may have begun its reasoning; empty if it has not.
        tools: the tools of the request.
    """

    def __init__(self, compiled: CompiledTemplate, prompt: str, tools: ToolUse) -> None:
        self._calls = compiled.calls
        self._template = compiled.template
        self._tools = tools
        self._writer = PartWriter()
        self.reasoning: Literal["awaited", "open", "closed", "absent"] = (
            "awaited" if compiled.has_reasoning else "absent"
        )
        """Whether the reasoning may still begin, has begun, has ended (perhaps in the prompt) or cannot come: it
        comes before all other parts."""
        self._reader: _Reader | None = None
        """Reads the region of calls that the text is in."""
        self._is_text = False
        """Whether that region turned out to be text."""
        self._parser = ResponseParser(self._template, prefix=prompt)
        for event in self._parser.initial_events:
            self._handle(event)
        self._writer.continue_prompt()
        self._mark_starts = compiled.mark_starts
        self._field: str | None = None
        """The field that the next text belongs to, up to a mark; None if only the template's parser knows."""

    def feed(self, text: str) -> list[Part]:
        """Returns the parts, or pieces of them, that the next text makes known. O(text)."""
        if self._field is not None and self._mark_starts[self._field].isdisjoint(text):
            self._handle({"type": "region_chunk", "field": self._field, "text": text})
            return self._writer.take()
        self._field = None
        for piece in self._pieces(text):
            events = self._parser.feed(piece)
            for event in events:
                self._handle(event)
            self._field = self._known_field(piece, events)
        return self._writer.take()

    def _known_field(self, piece: str, events: Sequence[Mapping[str, Any]]) -> str | None:
        """Returns the field that a piece of text belongs to, if no part of it may belong to a mark."""
        match events:
            case [*_, {"type": "region_chunk", "field": str(field), "text": text}] if text == piece:
                starts = self._mark_starts.get(field)
                return field if starts is not None and starts.isdisjoint(piece) else None
        return None

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Returns the rest at the end of the answer.

        Args:
            is_cut: whether something else than the model ended the answer; a call without its end is then left
                open.
        """
        _, events = self._parser.finalize()
        for event in events:
            self._handle(event, is_end=True, is_cut=is_cut)
        return self._writer.finish()

    @property
    def n_calls(self) -> int:
        """Calls found so far."""
        return self._writer.n_calls

    @property
    def is_reasoning_possible(self) -> bool:
        """Whether the next text may belong to the answer's reasoning."""
        return self.reasoning in ("awaited", "open")

    def _follow_reasoning(self, kind: str, field: str, text: str) -> None:
        if field in REASONING_FIELDS:
            self.reasoning = "closed" if kind == "region_close" else "open"
        elif field != self._template.implicit or text.strip():
            self.reasoning = "absent"

    def _pieces(self, text: str) -> list[str]:
        """Returns the text in pieces, none of which has text after the end of a region of calls."""
        if self._calls is None or not self._calls.closing or self._calls.closing[-1] not in text:
            return [text]
        last = self._calls.closing[-1]
        *pieces, rest = text.split(last)
        return [piece + last for piece in pieces] + ([rest] if rest else [])

    def _handle(self, event: Mapping[str, Any], *, is_end: bool = False, is_cut: bool = False) -> None:
        kind, field = event["type"], event["field"]
        if self.is_reasoning_possible and not (is_end and kind == "region_close"):
            self._follow_reasoning(kind, field, event.get("text", ""))
        if field != TOOL_FIELD:
            part = ReasoningPart if field in REASONING_FIELDS else TextPart
            if kind == "region_chunk":
                self._writer.add_text(part, event["text"])
            elif kind == "region_open" and field != self._template.implicit:
                self._writer.break_line(part)
            return
        assert self._calls is not None
        if kind == "region_open":
            self._reader, self._is_text = self._open_reader(self._calls), False
        elif kind == "region_chunk":
            if self._reader is not None:
                self._read(self._reader, event["text"])
        elif self._reader is None:
            self._add_region(event["value"]["opening"], event["value"]["content"], is_cut=is_cut)
        elif self._reader.is_in_string and self._calls.opening and self._calls.closing and not is_end:
            self._reopen(self._reader, self._calls)
        else:
            self._close(self._reader, self._calls, is_end=is_end, is_cut=is_cut)

    def _open_reader(self, calls: _Calls) -> _Reader | None:
        if calls.is_xml:
            return XmlCallReader({tool.name: tool.parameters for tool in self._tools.tools})
        if calls.is_gemma:
            return GemmaCallReader()
        if calls.keys is None:
            return None
        # Without a marker of its own, a call is told from other JSON by the function's name.
        return JsonCallReader(*calls.keys, None if calls.opening else self._tools.callable_names)

    def _read(self, reader: _Reader, text: str) -> None:
        if self._is_text:
            self._writer.add_text(TextPart, text)
            return
        n_before = reader.n_calls
        for piece in reader.feed(text):
            self._writer.add_call(piece)
        if reader.is_failed:
            self._turn_to_text(reader, is_first=not n_before and not reader.n_calls)

    def _turn_to_text(self, reader: _Reader, *, is_first: bool) -> None:
        """Gives the unread rest of a region as text."""
        assert self._calls is not None
        self._is_text = True
        self._writer.add_text(TextPart, (self._calls.opening if is_first else "") + reader.unread)

    def _reopen(self, reader: _Reader, calls: _Calls) -> None:
        """Goes on in a region that only seemed to end: the text of its end stands in a string of the arguments."""
        self._parser = ResponseParser(self._template, prefix=calls.opening)
        self._read(reader, calls.closing)

    def _close(self, reader: _Reader, calls: _Calls, *, is_end: bool, is_cut: bool) -> None:
        """Ends a region."""
        for piece in reader.finish(is_closed=not is_cut):
            self._writer.add_call(piece)
        if not self._is_text and (reader.unread or not reader.n_calls):
            self._turn_to_text(reader, is_first=not reader.n_calls)
        if self._is_text and not is_end:
            self._writer.add_text(TextPart, calls.closing)

    def _add_region(self, opening: str, content: str, *, is_cut: bool) -> None:
        """Adds the calls of a whole region."""
        assert self._calls is not None
        try:
            message = parse_response(
                opening + content,
                self._calls.template,
                prefix="",
                tools=[*(tool.definition for tool in self._tools.tools)],
            )
            pieces = [CallPiece(*call) for call in _flat_calls(message.get(TOOL_FIELD))]
        except (ValueError, LookupError, RecursionError):
            pieces = []
        for piece in pieces:
            if is_cut and not self._calls.is_json:  # cut JSON has no pieces
                piece.arguments = piece.arguments[:-1]
            self._writer.add_call(piece)
        if not pieces:
            self._writer.add_text(TextPart, opening + content + self._calls.closing)


def _flat_calls(value: object) -> Iterator[tuple[str, str]]:
    """Yields name and arguments of all calls of a parsed message. Raises ``ValueError`` for what is no call."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _flat_calls(item)
        return
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError("a call has no name")
    arguments = function.get("arguments")
    yield name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
