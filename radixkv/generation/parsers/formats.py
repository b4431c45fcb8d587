"""Formats in which models write calls of tools and reasoning, for checkpoints that do not describe their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError

NONE = "none"
"""The name that turns a parser off."""

TOOL_FIELD = "tool_calls"
"""The name that response templates have for calls."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that response templates have for reasoning."""


@dataclass(frozen=True)
class CallTag:
    """What stands around a call's arguments, for a grammar. ``NAME`` stands for the function's name."""

    trigger: str
    """Text that only begins a call."""
    begin: str
    end: str
    separator: str = ""
    """What stands between two calls."""
    opening: str = ""
    """What stands before the first call only."""
    closing: str = ""
    """What stands after the last call only."""
    style: str = "json"
    """xgrammar's name of how the arguments are written."""
    is_parallel: bool = True
    """Whether the format has a way to write several calls."""


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls."""

    name: str
    """vLLM's name of it."""
    aliases: tuple[str, ...]
    """Further names that vLLM and SGLang have for it."""
    marks: tuple[str, ...]
    """Texts that a chat template of this format contains."""
    field: Mapping[str, Any]
    """The field ``tool_calls`` of a response template, as Transformers reads it."""
    tag: CallTag
    foreign_marks: tuple[str, ...] = ()
    """Texts of other formats that have the marks, too; a chat template with one of them is not of this format."""

    def is_shown_by(self, chat_template: str) -> bool:
        """Returns whether a chat template is of this format."""
        has_marks = all(mark in chat_template for mark in self.marks)
        return has_marks and not any(mark in chat_template for mark in self.foreign_marks)


REASONING_NAMES = ("qwen3", "deepseek_r1", "deepseek-r1", "qwen3-thinking")
"""Names that vLLM and SGLang have for the one format of reasoning."""
_REASONING_MARK = "</think>"
"""Text that a chat template for reasoning contains."""

REASONING_FIELD: Mapping[str, Any] = {"open_pattern": r"\A\s*<think>", "close": "</think>", "content": "text"}
"""Reasoning between ``<think>`` and ``</think>`` at the start of the answer, or from the end of the prompt on."""


def _transform(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_FORMATS = (
    ToolFormat(
        "qwen3_coder",
        ("qwen3_xml",),
        ("<function=", "<parameter="),
        {
            "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
            # A pattern that could end earlier would do so while the rest is still to come.
            "close_pattern": r"</function>\s*(?:</tool_call>|(?=<[^/])|(?=[^<\s])|\Z)",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _transform("{name}", "{content}"),
        },
        CallTag(
            "<tool_call>\n<function=",
            "<tool_call>\n<function=NAME>\n",
            "\n</function>\n</tool_call>",
            "\n",
            style="qwen_xml",
        ),
    ),
    ToolFormat(
        "hermes",
        ("qwen", "qwen25"),
        ("<tool_call>",),
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _transform("{content.name}", "{content.arguments}"),
        },
        CallTag("<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
        ("<arg_key>",),
    ),
    ToolFormat(
        "mistral_args",
        (),
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": _transform("{name}", "{content}"),
        },
        CallTag("[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]", ""),
    ),
    ToolFormat(
        "mistral",
        (),
        ("[TOOL_CALLS]",),
        {
            "open": "[TOOL_CALLS]",
            "repeats": True,
            "content": "json",
            "transform_each": True,
            "transform": _transform("{name}", "{arguments}"),
        },
        CallTag("[TOOL_CALLS]", '{"name": "NAME", "arguments": ', "}", ", ", opening="[TOOL_CALLS] [", closing="]"),
    ),
    ToolFormat(
        "llama3_json",
        ("llama4_json", "llama3"),
        ('"parameters": ', "ipython"),
        {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)",
            "repeats": True,
            "content": "json",
            "transform": _transform("{content.name}", "{content.parameters}"),
        },
        CallTag('{"name": ', '{"name": "NAME", "parameters": ', "}", is_parallel=False),
    ),
)
"""All formats. Where the marks of several are in a chat template, the first is taken."""


def find_tool_format(name: str | None, chat_template: str) -> ToolFormat | None:
    """Returns the format of calls with this name, or the one that a chat template shows; None if there is none.

    Args:
        name: of ``--tool-call-parser``; None to look at the chat template.
        chat_template: its text.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name == NONE:
        return None
    shown = [one for one in TOOL_FORMATS if one.is_shown_by(chat_template)]
    if name is None:
        return shown[0] if shown and "tools" in chat_template else None
    named = [one for one in TOOL_FORMATS if name in (one.name, *one.aliases)]
    if name == "mistral":  # two generations of Mistral's models differ, and have one name in vLLM
        named = [one for one in shown if one.name.startswith(name)] or named
    if not named:
        names = sorted(alias for one in TOOL_FORMATS for alias in (one.name, *one.aliases))
        raise ConfigError(f"tool_call_parser is {name!r}; it must be one of {', '.join(names)} or {NONE}")
    return named[0]


def finds_reasoning(name: str | None, chat_template: str) -> bool:
    """Returns whether to look for reasoning: by the name of a parser, or by the chat template if that is None.

    Raises:
        ConfigError: there is no parser of this name.
    """
    if name is None:
        return _REASONING_MARK in chat_template
    if name not in (NONE, *REASONING_NAMES):
        raise ConfigError(f"reasoning_parser is {name!r}; it must be one of {', '.join(REASONING_NAMES)} or {NONE}")
    return name != NONE
