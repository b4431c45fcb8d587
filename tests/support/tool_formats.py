"""Formats of models' answers, for tests of parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart
from radixkv.generation.tools import ToolUse, parse_tool_use
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string"},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "search", "parameters": TYPED}},
    {"type": "function", "function": {"name": "now"}},
]
USE = parse_tool_use(TOOLS)

HEADER = "<|im_start|>assistant\n"
SHOWN_BY = {
    "hermes": "<tools></tools> <tool_call>",
    "qwen3_coder": "<tool_call><function=NAME><parameter=NAME>",
    "mistral": "[TOOL_CALLS] [",
    "mistral_args": "[TOOL_CALLS]NAME[ARGS]",
    "llama3_json": 'ipython "parameters": ',
    "openai": "<|channel|>commentary to=functions.",
    "gemma4": "<|tool_call>call:",
}
"""By format: what its chat template contains."""


REASONING_SHOWN_BY = {"openai": "<|channel|>analysis", "gemma4": "<|channel>thought"}
"""By format: what its chat template contains if the model reasons; ``</think>`` for others."""


def chat_template(format_name: str, *, has_reasoning: bool = False) -> ChatTemplate:
    """Returns a chat template of the ChatML kind that shows tools, and belongs to a format."""
    reasoning = REASONING_SHOWN_BY.get(format_name, "</think>") if has_reasoning else ""
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        f"{{# {SHOWN_BY[format_name]} {reasoning} #}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefill }}{% endif %}"
    )
    return ChatTemplate(source, {}, "the test")


def answer_format(
    folder: Path, format_name: str, *, has_reasoning: bool = False, tokenizer: Tokenizer | None = None
) -> AnswerFormat:
    """Returns the format that ``chat_template`` shows; the folder has no files."""
    template = chat_template(format_name, has_reasoning=has_reasoning)
    found = AnswerFormat.load(folder, template, tokenizer=tokenizer)
    assert found is not None
    return found


def parse(
    one: AnswerFormat, pieces: list[str], *, prompt: str = HEADER, tools: ToolUse = USE, is_cut: bool = False
) -> list[Any]:
    """Returns the whole parts of an answer: text, ``("think", text)`` or ``(name, arguments)``.

    Checks what holds for all answers: calls are numbered in order, and have one id each.
    """
    parser = one.open_parser(prompt, tools)
    assert parser is not None
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish(is_cut=is_cut)
    whole: list[Any] = []
    ids: list[str] = []
    for part in parts:
        match part:
            case ToolCallPart(index=index, id=call_id) if call_id:
                assert index == len(ids)
                ids.append(call_id)
                whole.append((part.name, part.arguments))
            case ToolCallPart():
                assert part.index == len(ids) - 1
                assert not part.name
                name, arguments = whole[-1]
                whole[-1] = (name, arguments + part.arguments)
            case TextPart():
                is_more = bool(whole) and isinstance(whole[-1], str)
                whole[-1:] = [whole[-1] + part.text] if is_more else [*whole[-1:], part.text]
            case ReasoningPart():
                is_more = bool(whole) and whole[-1][0] == "think"
                whole[-1:] = (
                    [("think", whole[-1][1] + part.text)] if is_more else [*whole[-1:], ("think", part.text)]
                )
    assert len(set(ids)) == len(ids)
    return whole
