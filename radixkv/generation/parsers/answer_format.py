"""How a model writes its answers: the format of calls and reasoning, as its checkpoint or the user says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from radixkv.checkpoints.files import read_object
from radixkv.errors import CheckpointError, InvalidRequest, UnsupportedFeature
from radixkv.generation.parsers.formats import (
    NONE,
    REASONING_FIELDS,
    REASONING_FORMATS,
    TOOL_FIELD,
    CallTag,
    ReasoningTag,
    find_reasoning_format,
    find_tool_format,
)
from radixkv.generation.parsers.structural_tags import Stage, StructuralTags
from radixkv.generation.tools import ToolUse
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.structured_outputs import SPECIAL_MARKS, StructuredOutputs

if TYPE_CHECKING:
    from radixkv.generation.parsers.answer_parser import AnswerParser

_ALWAYS_TEXT: Mapping[str, Any] = {"content": "text"}
_NO_ANCHOR = "\x00"
_SWITCH = "enable_thinking"
"""The variable of chat templates that switches reasoning on or off."""
_PROBE = ({"role": "user", "content": "a"},)
_NO_IDS: Mapping[str, int] = MappingProxyType({})
_THINK = re.compile(r"</?think>|<\|channel>|<channel\|>")
"""Marks of reasoning that a chat template may write at the beginning of an answer."""
_LAST_THINK = re.compile(r"(?:</?think>|<channel\|>)\s*\Z")


class AnswerFormat:
    """The format of a model's answers. Thread-safe.

    Args:
        response_template: as Transformers reads it, with the fields ``tool_calls`` and ``reasoning_content`` as far
            as the format has them.
        tag: what stands around a call's arguments; None if unknown.
        origin: where the template comes from, for error messages.
        reasoning_tag: what stands around reasoning; None if unknown.
        mark_ids: ids of the marks of these tags that are special tokens.
        has_header: whether prompts end with a text that begins the answer.
        reasons_by_default: whether the model reasons if a request does not say; None if requests cannot say.

    Raises:
        CheckpointError: the template is malformed.

    Cost: about 2 s in a process that has not imported Transformers.
    """

    def __init__(
        self,
        response_template: Mapping[str, Any],
        tag: CallTag | None,
        origin: str,
        *,
        reasoning_tag: ReasoningTag | None = None,
        mark_ids: Mapping[str, int] = _NO_IDS,
        has_header: bool = True,
        reasons_by_default: bool | None = None,
    ) -> None:
        # Imported here because it takes long, and few models need it.
        from radixkv.generation.parsers.answer_parser import AnswerParser, compile_template

        try:
            fields = response_template["fields"]
            self.has_tools = TOOL_FIELD in fields
            self.has_reasoning = any(name in fields for name in REASONING_FIELDS)
            self._compiled = {
                (has_tools, has_reasoning): compile_template(
                    response_template, has_tools=has_tools, has_reasoning=has_reasoning
                )
                for has_tools in {False, self.has_tools}
                for has_reasoning in {False, self.has_reasoning}
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{origin} is not a response template: {error}; choose formats with --tool-call-parser and "
                "--reasoning-parser"
            ) from error
        self._open = AnswerParser
        self._tag = tag
        self._reasoning_tag = reasoning_tag
        self._mark_ids = mark_ids
        self._anchored = response_template.get("start_anchor") != _NO_ANCHOR
        self._has_header = has_header
        self._reasons_by_default = reasons_by_default

    @classmethod
    def load(
        cls,
        folder: Path,
        chat_template: ChatTemplate | None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> AnswerFormat | None:
        """Returns the format of a checkpoint; None if it has neither calls nor reasoning.

        Args:
            folder: the folder of the tokenizer, whose ``tokenizer_config.json`` may have a ``response_template``.
            chat_template: the model's; otherwise the one that it uses with tools shows the format.
            tool_call_parser: name of the format of calls, or ``none``; None finds it out.
            reasoning_parser: name of the format of reasoning, or ``none``; None finds it out.
            tokenizer: the model's, which says which marks are special tokens.

        Raises:
            CheckpointError: the response template is malformed.
            ConfigError: there is no format of that name.
        """
        source = "" if chat_template is None else chat_template.with_tools.source
        tool_format = find_tool_format(tool_call_parser, source)
        reasoning_format = find_reasoning_format(reasoning_parser, source)
        path = folder / "tokenizer_config.json"
        own = (read_object(path) or {}).get("response_template")
        if not isinstance(own, Mapping | None) or not isinstance((own or {}).get("fields", {}), Mapping):
            raise CheckpointError(f"{path}: response_template is not an object with fields; correct the file")
        fields = dict((own or {}).get("fields") or {"content": _ALWAYS_TEXT})
        if tool_call_parser is not None or own is None:
            fields.pop(TOOL_FIELD, None)
            if tool_format is not None:
                fields |= tool_format.fields
        if reasoning_parser is not None or own is None:
            for name in REASONING_FIELDS:
                fields.pop(name, None)
            if reasoning_format is not None:
                fields |= reasoning_format.fields
            reasoning_tag = None if reasoning_format is None else reasoning_format.tag
        else:
            reasoning_tag = _own_reasoning_tag(fields)
        if fields.keys() <= {"content", "role"}:
            return None
        headers = _assistant_headers(chat_template)
        anchors = sorted(
            {anchor for header in headers if (anchor := _THINK.split(header)[0])}
            | set(() if tool_format is None else tool_format.anchors)
        )
        anchor = {} if own is not None else {"start_anchor": anchors or _NO_ANCHOR}
        tag = None if tool_format is None else tool_format.tag
        return cls(
            {**(own or {}), **anchor, "fields": fields},
            tag,
            f"{path}: response_template",
            reasoning_tag=reasoning_tag,
            mark_ids={} if tokenizer is None else tokenizer.special_ids(SPECIAL_MARKS),
            has_header=any(headers),
            reasons_by_default=_reasons_by_default(chat_template),
        )

    def open_parser(self, prompt: str, tools: ToolUse, *, has_reasoning: bool = True) -> AnswerParser | None:
        """Returns a parser of one answer; None if its text needs none. O(prompt).

        Args:
            prompt: the rendered prompt, which may have begun the answer.
            tools: the tools of the request.
            has_reasoning: whether to split reasoning off.
        """
        compiled = self._compiled[(self.has_tools and tools.mode != NONE, self.has_reasoning and has_reasoning)]
        if compiled is self._compiled[(False, False)]:
            return None
        if not (self._anchored and compiled.template.start_anchor_re.search(prompt)):
            prompt = self._last_mark(prompt)
        return self._open(compiled, prompt, tools)

    def _last_mark(self, prompt: str) -> str:
        """Returns the mark of reasoning at the end of a prompt in which the answer's beginning is not found."""
        mark = _LAST_THINK.search(prompt) if self._has_header else None
        return "" if mark is None else mark[0]

    def constraint(
        self,
        prompt: str,
        tools: ToolUse,
        text_format: StructuredOutputs | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> StructuredOutputs | None:
        """Returns what the whole answer must match so that its calls and its text are as the request demands.

        Reasoning that may come before is free. None for any text. O(prompt).

        Args:
            prompt: the rendered prompt, which may have begun the answer.
            tools: the tools of the request.
            text_format: what the answer's text must match; where calls are demanded, it has no effect.
            variables: those that the request set for the chat template, which may have switched reasoning off.

        Raises:
            InvalidRequest: the schemas are too large, or there are tools besides a structural tag of the request.
            UnsupportedFeature: the format of calls or of reasoning is one that this release cannot demand.
        """
        if not (tools.is_constrained or text_format):
            return None
        has_calls = tools.mode != "none"
        if has_calls and self._tag is None:
            raise UnsupportedFeature(
                "this model's format of calls cannot be demanded; leave out tool_choice, strict, "
                "parallel_tool_calls and response_format, or start the server with another --tool-call-parser",
                param="tool_choice",
            )
        stage = self._stage(prompt, reasons=self._reasons(variables or {}))
        if not has_calls and stage == "absent":
            return text_format
        if self.has_reasoning and self._reasoning_tag is None:
            raise UnsupportedFeature(
                "this model's format of reasoning cannot come before an answer with a format; leave the format and "
                "tool_choice out, or start the server with another --reasoning-parser",
                param="tools" if has_calls else "structured_outputs",
            )
        tags = StructuralTags(self._tag if has_calls else None, self._reasoning_tag, self._mark_ids)
        tag = tags.make(tools, text_format, stage)
        try:
            return StructuredOutputs(structural_tag=tag)
        except InvalidRequest as error:
            param = "tools" if has_calls else "structured_outputs"
            raise InvalidRequest(f"the schemas are too large: {error}", param=param) from None

    def _reasons(self, variables: Mapping[str, Any]) -> bool:
        """Returns whether the request lets the model reason, if it does not do so already in the prompt."""
        if self._reasons_by_default is None:
            return True
        wanted = variables.get(_SWITCH)
        return self._reasons_by_default if wanted is None else bool(wanted)

    def _stage(self, prompt: str, *, reasons: bool) -> Stage:
        """Returns where the prompt leaves the reasoning."""
        parser, tag = self.open_parser(prompt, ToolUse()), self._reasoning_tag
        if parser is None:
            return "absent"
        if parser.reasoning == "awaited":
            end = prompt.rstrip()
            if tag is not None and end.endswith(tag.begin):  # the parser may still wait for more of this mark
                return "open"
            if tag is not None and any(text and end.endswith(text) for text in tag.text_begin):
                return "absent"
            # A model that reasons seldom without being asked would do so under a grammar that allows nothing else
            # that it likes.
            return "awaited" if reasons else "absent"
        is_over = parser.reasoning == "closed" and tag is not None and not tag.next_message
        return "absent" if is_over else parser.reasoning


def _own_reasoning_tag(fields: Mapping[str, Any]) -> ReasoningTag | None:
    """Returns what stands around the reasoning of a response template; None if it is not always the same."""
    field = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if not isinstance(field, Mapping):
        return None
    begin, end = field.get("open"), field.get("close")
    if not (isinstance(begin, str) and isinstance(end, str)):
        return None
    known = next((one.tag for one in REASONING_FORMATS if one.tag.begin == begin.strip()), None)
    return known or ReasoningTag(begin, end)


def _reasons_by_default(chat_template: ChatTemplate | None) -> bool | None:
    """Returns whether a chat template asks for reasoning unless it is switched off; None if it has no switch."""
    if chat_template is None:
        return None
    try:
        default, on, off = (
            chat_template.render(_PROBE, **each) for each in ({}, {_SWITCH: True}, {_SWITCH: False})
        )
    except InvalidRequest:
        return None
    return None if on == off else default != off


def _assistant_headers(chat_template: ChatTemplate | None) -> list[str]:
    """Returns what a chat template writes before the assistant's answer, without tools and with them."""
    if chat_template is None:
        return []
    headers = []
    for template in {chat_template, chat_template.with_tools}:
        try:
            before = template.render(_PROBE, add_generation_prompt=False)
            whole = template.render(_PROBE)
        except InvalidRequest:
            continue
        if whole.startswith(before):
            headers.append(whole.removeprefix(before))
    return headers
