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
_TEXT_FIELD = "text"
"""Our name of text that has marks around it; ``content`` is what stands outside all other fields."""


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
    """How the arguments are written: xgrammar's name of it, or ``gemma``."""
    is_parallel: bool = True
    """Whether the format has a way to write several calls."""


@dataclass(frozen=True)
class ReasoningTag:
    """What stands around reasoning and before the answer's text, for a grammar."""

    begin: str
    end: str
    next_message: str = ""
    """What stands between the end and whatever follows. With it, there may be several pieces of reasoning."""
    text_begin: tuple[str, ...] = ("",)
    """What stands before the answer's text, one of these."""


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
    tag: CallTag | None
    """None: a grammar cannot demand calls."""
    foreign_marks: tuple[str, ...] = ()
    """Texts of other formats that have the marks, too; a chat template with one of them is not of this format."""
    text_field: Mapping[str, Any] | None = None
    """The field of text, if the model writes marks around that too."""
    anchors: tuple[str, ...] = ()
    """Texts at the end of a prompt after which the model goes on with its turn, beside the header of an answer."""

    @property
    def fields(self) -> dict[str, Mapping[str, Any]]:
        """The fields of a response template, other than ``content``."""
        return {TOOL_FIELD: self.field} | ({} if self.text_field is None else {_TEXT_FIELD: self.text_field})

    def is_shown_by(self, chat_template: str) -> bool:
        """Returns whether a chat template is of this format."""
        has_marks = all(mark in chat_template for mark in self.marks)
        return has_marks and not any(mark in chat_template for mark in self.foreign_marks)


@dataclass(frozen=True)
class ReasoningFormat:
    """A format of reasoning."""

    names: tuple[str, ...]
    """Names that vLLM and SGLang have for it."""
    mark: str
    """Text that a chat template of this format contains."""
    field: Mapping[str, Any]
    """The field ``reasoning_content`` of a response template."""
    tag: ReasoningTag
    text_field: Mapping[str, Any] | None = None
    """The field of text, if the model writes marks around that too."""

    @property
    def fields(self) -> dict[str, Mapping[str, Any]]:
        """The fields of a response template, other than ``content``."""
        own = {REASONING_FIELDS[0]: self.field}
        return own | ({} if self.text_field is None else {_TEXT_FIELD: self.text_field})


# A mark that may still come is looked for again with each token, from where it would begin. So no part of a pattern
# has any length: names have up to 256 characters, white space 64.
_CHANNEL = r"(?:<\|start\|>assistant)?<\|channel\|>"
"""Begins a message of GPT-OSS; the prompt ends with the first one's ``<|start|>assistant``."""
_CHANNEL_TEXT: Mapping[str, Any] = {
    # The second is what an answer ends with if it is cut before the text of a message.
    "open_pattern": _CHANNEL + r"(?:final|commentary)(?: ?<\|constrain\|>[^<]{0,256})?<\|message\|>"
    r"|(?:<\|start\|>|<\|channel\|>)(?:[^<]|<\|channel\|>|<\|constrain\|>){0,256}\Z",
    "close": ["<|end|>", "<|return|>"],
    "content": "text",
}
REASONING_FORMATS = (
    ReasoningFormat(
        ("openai_gptoss", "gpt-oss"),
        "<|channel|>analysis",
        {"open_pattern": _CHANNEL + r"analysis<\|message\|>", "close": "<|end|>", "content": "text"},
        ReasoningTag(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|start|>assistant",
            ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
        ),
        _CHANNEL_TEXT,
    ),
    ReasoningFormat(
        ("qwen3", "deepseek_r1", "deepseek-r1", "qwen3-thinking"),
        "</think>",
        # At the start of the answer, or from the end of the prompt on.
        {"open_pattern": r"\A\s{0,64}<think>", "close": "</think>", "content": "text"},
        ReasoningTag("<think>", "</think>"),
    ),
    ReasoningFormat(
        ("gemma4",),
        "<|channel>thought",
        {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        ReasoningTag("<|channel>thought\n", "<channel|>"),
    ),
)
"""All formats. Where the marks of several are in a chat template, the first is taken."""


def _transform(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_XML_MARK = r"(?:<tool_call>\s{0,64})?<function="
XML_CALLS: Mapping[str, Any] = {
    "open_pattern": _XML_MARK + r"(?P<name>[^<>\n]{1,256})>",
    # A pattern that could end earlier would do so while the rest is still to come.
    "close_pattern": r"</function>\s{0,64}+(?:</tool_call>|(?=<[^/])|(?=[^<])|\Z)",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>"},
    "transform": _transform("{name}", "{content}"),
}
"""Calls in Qwen3-Coder's XML, which ``XmlCallReader`` reads as they arrive."""
XML_OPENING = _XML_MARK + r"(?=[^<>\n]{1,256}>)"
"""What begins such a call, before the function's name."""

GEMMA_CALLS: Mapping[str, Any] = {
    "open": "<|tool_call>",
    "close": "<tool_call|>",
    "repeats": True,
    "content": "text",
    "transform": "{content}",
}
"""Calls in Gemma 4's notation, which ``GemmaCallReader`` reads as they arrive."""

TOOL_FORMATS = (
    ToolFormat(
        "openai",
        ("gpt-oss",),
        ("<|channel|>", "functions."),
        {
            # The recipient stands before the channel or after it.
            "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w{1,64})?"
            r" ?to=functions\.(?P<name>[\w.-]{1,256})"
            r"(?: ?<\|channel\|>\w{1,64})?[^<]{0,256}(?:<\|constrain\|>[^<]{0,256})?<\|message\|>",
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _transform("{name}", "{content}"),
        },
        CallTag("", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", is_parallel=False),
        text_field=_CHANNEL_TEXT,
    ),
    ToolFormat(
        "gemma4",
        (),
        ("<|tool_call>call:",),
        GEMMA_CALLS,
        CallTag("<|tool_call>", "<|tool_call>call:NAME", "<tool_call|>", style="gemma"),
        anchors=("<tool_response|>",),
    ),
    ToolFormat(
        "qwen3_coder",
        ("qwen3_xml",),
        ("<function=", "<parameter="),
        XML_CALLS,
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
            "open_pattern": r"\[TOOL_CALLS\]\s{0,64}(?P<name>[\w.-]{1,256})(?:\[CALL_ID\]\w{1,256})?\[ARGS\]",
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
            "open_pattern": r"\A\s{0,64}(?:<\|python_tag\|>\s{0,64})?(?=\{)",
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


def find_reasoning_format(name: str | None, chat_template: str) -> ReasoningFormat | None:
    """Returns the format of reasoning with this name, or the one that a chat template shows; None if there is none.

    Args:
        name: of ``--reasoning-parser``; None to look at the chat template.
        chat_template: its text.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name is None:
        return next((one for one in REASONING_FORMATS if one.mark in chat_template), None)
    if name == NONE:
        return None
    found = next((one for one in REASONING_FORMATS if name in one.names), None)
    if found is None:
        names = ", ".join(sorted(each for one in REASONING_FORMATS for each in one.names))
        raise ConfigError(f"reasoning_parser is {name!r}; it must be one of {names} or {NONE}")
    return found
