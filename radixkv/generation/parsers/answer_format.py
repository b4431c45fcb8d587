"""How a model writes its answers: the format of calls and reasoning, as its checkpoint or the user says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.checkpoints.files import read_object
from radixkv.errors import CheckpointError, InvalidRequest, UnsupportedFeature
from radixkv.generation.parsers.formats import (
    NONE,
    REASONING_FIELDS,
    TOOL_FIELD,
    CallTag,
    find_reasoning_format,
    find_tool_format,
)
from radixkv.generation.parsers.structural_tags import structural_tag
from radixkv.generation.tools import ToolUse
from radixkv.structured_outputs import StructuredOutputs
from radixkv.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from radixkv.generation.parsers.answer_parser import AnswerParser

_ALWAYS_TEXT: Mapping[str, Any] = {"content": "text"}
_NO_ANCHOR = "\x00"


class AnswerFormat:
    """The format of a model's answers. Thread-safe.

    Args:
        response_template: as Transformers reads it, with the fields ``tool_calls`` and ``reasoning_content`` as far
            as the format has them.
        tag: what stands around a call's arguments; None if unknown.
        origin: where the template comes from, for error messages.

    Raises:
        CheckpointError: the template is malformed.

    Cost: about 2 s in a process that has not imported Transformers.
    """

    def __init__(self, response_template: Mapping[str, Any], tag: CallTag | None, origin: str) -> None:
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
        self._anchored = response_template.get("start_anchor") != _NO_ANCHOR

    @classmethod
    def load(
        cls,
        folder: Path,
        chat_template: ChatTemplate | None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> AnswerFormat | None:
        """Returns the format of a checkpoint; None if it has neither calls nor reasoning.

        Args:
            folder: the folder of the tokenizer, whose ``tokenizer_config.json`` may have a ``response_template``.
            chat_template: the model's, which shows the format otherwise.
            tool_call_parser: name of the format of calls, or ``none``; None finds it out.
            reasoning_parser: name of the format of reasoning, or ``none``; None finds it out.

        Raises:
            CheckpointError: the response template is malformed.
            ConfigError: there is no format of that name.
        """
        source = "" if chat_template is None else chat_template.source
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
        if fields.keys() <= {"content", "role"}:
            return None
        anchor = {} if own is not None else {"start_anchor": _assistant_header(chat_template) or _NO_ANCHOR}
        tag = None if tool_format is None else tool_format.tag
        return cls({**(own or {}), **anchor, "fields": fields}, tag, f"{path}: response_template")

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
        return self._open(compiled, prompt if self._anchored else "", tools)

    def constraint(
        self, prompt: str, tools: ToolUse, text_format: StructuredOutputs | None = None
    ) -> StructuredOutputs | None:
        """Returns what the answer must match so that its calls are as the request demands; None for any text.

        Args:
            prompt: the rendered prompt, which may have begun the answer.
            tools: the tools of the request.
            text_format: what the answer must match if it is no call; where calls are demanded, it has no effect.

        Raises:
            InvalidRequest: the schemas are too large, or there are tools besides a structural tag of the request.
            UnsupportedFeature: the format of calls is one that this release cannot demand.
        """
        if tools.mode == "none" or not (tools.is_constrained or text_format):
            return text_format
        if self._tag is None:
            raise UnsupportedFeature(
                "this model's format of calls cannot be demanded; leave out tool_choice, strict, "
                "parallel_tool_calls and response_format, or start the server with another --tool-call-parser",
                param="tool_choice",
            )
        tag = structural_tag(self._tag, tools, prompt, text_format, has_reasoning=self.has_reasoning)
        try:
            return StructuredOutputs(structural_tag=tag)
        except InvalidRequest as error:
            raise InvalidRequest(f"the schemas of the tools are too large: {error}", param="tools") from None


def _assistant_header(chat_template: ChatTemplate | None) -> str:
    """Returns what a chat template writes before the assistant's answer, or an empty text."""
    if chat_template is None:
        return ""
    messages = [{"role": "user", "content": "a"}]
    try:
        before = chat_template.render(messages, add_generation_prompt=False)
        whole = chat_template.render(messages)
    except InvalidRequest:
        return ""
    header = whole.removeprefix(before) if whole.startswith(before) else ""
    return header.partition("<think>")[0]
