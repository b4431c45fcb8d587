"""Structural tags accept what a request demands, and nothing else, as xgrammar reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.tools import parse_tool_use
from radixkv.runtime.structured.source import prepare_source
from radixkv.structured_outputs import StructuredOutputs
from support.tool_formats import HEADER, TOOLS, USE, answer_format, chat_template, parse

EOS = 256
PARIS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
    "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris"}}',
}
BOTH = {
    "hermes": PARIS["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": PARIS["qwen3_coder"] + "\n<tool_call>\n<function=now>\n\n</function>\n</tool_call>",
    "mistral": PARIS["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": PARIS["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
ONLY_NOW = [{"type": "function", "function": {"name": "now"}}]

Accepts = Callable[..., bool]


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [*(bytes([byte]) for byte in range(EOS)), b"<eos>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[EOS]))


@pytest.fixture
def accepts(compiler: xgrammar.GrammarCompiler, tmp_path: Path) -> Accepts:
    """Returns a function that says whether a text is a whole answer to a request with these tools."""

    def accepts(
        one: AnswerFormat,
        text: str,
        *request: Any,
        tools: object = TOOLS,
        prompt: str = HEADER,
        text_format: StructuredOutputs | None = None,
    ) -> bool:
        constraint = one.constraint(prompt, parse_tool_use(tools, *request), text_format)
        if constraint is None:
            return True
        assert constraint.structural_tag is not None
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(prepare_source(constraint).text))
        return all(matcher.accept_token(token) for token in [*text.encode(), EOS])

    return accepts


@pytest.mark.parametrize("name", PARIS)
def test_demanded_calls(accepts: Accepts, tmp_path: Path, name: str) -> None:
    one = answer_format(tmp_path, name)
    for choice in ("required", NAMED):
        assert accepts(one, PARIS[name], choice)
        for wrong in ("", "Hello.", f"Hello. {PARIS[name]}", PARIS[name].replace("city", "town")):
            assert not accepts(one, wrong, choice)
    both = BOTH.get(name)
    if both is not None:
        assert accepts(one, both, "required")
        assert not accepts(one, both, NAMED)
        assert not accepts(one, both, "required", False)


@pytest.mark.parametrize("parameters", [{}, {"description": "none"}])
def test_demanded_arguments_are_an_object(accepts: Accepts, tmp_path: Path, parameters: Any) -> None:
    one = answer_format(tmp_path, "hermes")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    assert accepts(one, PARIS["hermes"], "required", tools=tools)
    assert not accepts(one, PARIS["hermes"].replace('{"city": "Paris"}', "3"), "required", tools=tools)


def test_a_schema_that_no_grammar_enforces_demands_an_object_unless_it_is_strict(
    accepts: Accepts, tmp_path: Path
) -> None:
    one, text = answer_format(tmp_path, "hermes"), PARIS["hermes"].replace('"Paris"', "[1, 1]")
    parameters = {"type": "object", "properties": {"city": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "weather", "parameters": parameters}
    assert accepts(one, text, "required", tools=[{"type": "function", "function": tool}])
    assert not accepts(one, "Hello.", "required", tools=[{"type": "function", "function": tool}])
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        accepts(one, text, "required", tools=[{"type": "function", "function": {**tool, "strict": True}}])


@pytest.mark.parametrize("name", PARIS)
def test_strict_tools_in_free_text(accepts: Accepts, tmp_path: Path, name: str) -> None:
    one = answer_format(tmp_path, name)
    assert one.constraint(HEADER, parse_tool_use(TOOLS)) is None
    for text in ("Hello.", PARIS[name], f"Hello. {PARIS[name]}"):
        assert accepts(one, text, tools=STRICT)
    assert not accepts(one, PARIS[name].replace("city", "town"), tools=STRICT)


def test_channels_are_not_demanded(tmp_path: Path) -> None:
    one = answer_format(tmp_path, "openai")
    assert one.constraint(HEADER, parse_tool_use(TOOLS)) is None
    text = StructuredOutputs(json_object=True)
    assert one.constraint(HEADER, parse_tool_use([]), text) == text
    for request, text_format in (((STRICT,), None), ((TOOLS, "required"), None), ((TOOLS,), text)):
        with pytest.raises(UnsupportedFeature, match="format of calls cannot be demanded"):
            one.constraint(HEADER, parse_tool_use(*request), text_format)


@pytest.mark.parametrize("name", BOTH)
def test_one_call_at_most(accepts: Accepts, tmp_path: Path, name: str) -> None:
    one = answer_format(tmp_path, name)
    for text in ("Hello.", PARIS[name]):
        assert accepts(one, text, "auto", False)
    assert not accepts(one, BOTH[name], "auto", False)


def test_a_format_without_a_way_to_write_several_calls_has_one(accepts: Accepts, tmp_path: Path) -> None:
    one, call = answer_format(tmp_path, "llama3_json"), PARIS["llama3_json"]
    assert accepts(one, call, "required")
    for separator in ("", "\n", "; "):
        assert not accepts(one, call + separator + call, "required")


def test_allowed_tools(accepts: Accepts, tmp_path: Path) -> None:
    one = answer_format(tmp_path, "hermes")
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": ONLY_NOW}}
        assert accepts(one, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', choice)
        assert not accepts(one, PARIS["hermes"], choice)


def test_reasoning_comes_before_demanded_calls(accepts: Accepts, tmp_path: Path) -> None:
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    call = PARIS["hermes"]
    assert accepts(one, call, "required")
    assert accepts(one, f"<think>\nI see.\n</think>\n\n{call}", "required")
    assert accepts(one, f"I see.\n</think>\n\n{call}", "required", prompt=f"{HEADER}<think>\n")
    assert not accepts(one, call, "required", prompt=f"{HEADER}<think>\n")
    assert not accepts(one, f"<think></think>{call}", "required", prompt=f"{HEADER}<think>\n\n</think>\n\n")


TEXT_FORMATS = [
    (
        StructuredOutputs(json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        '{"a": 1}',
    ),
    (StructuredOutputs(json_object=True), '{"b": 1}'),
    (StructuredOutputs(choice=("yes", "no")), "no"),
    (StructuredOutputs(regex="a+"), "aaa"),
    (StructuredOutputs(grammar='root ::= "a" | "b"'), "b"),
]


@pytest.mark.parametrize(("text_format", "text"), TEXT_FORMATS)
def test_an_answer_with_a_format_is_that_text_or_calls(
    accepts: Accepts, tmp_path: Path, text_format: StructuredOutputs, text: str
) -> None:
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    for answer in (text, BOTH["hermes"], f"<think>\nI see.\n</think>\n\n{text}"):
        assert accepts(one, answer, text_format=text_format)
    for answer in ("Hello.", f"{text} {PARIS['hermes']}"):
        assert not accepts(one, answer, text_format=text_format)
    assert accepts(one, BOTH["hermes"], "required", text_format=text_format)
    assert not accepts(one, text, "required", text_format=text_format), "a call is demanded"
    assert one.constraint(HEADER, parse_tool_use(TOOLS, "none"), text_format) is text_format


def test_a_structural_tag_of_the_request_excludes_tools(tmp_path: Path) -> None:
    for use in (USE, parse_tool_use(TOOLS, "required")):
        with pytest.raises(InvalidRequest, match="structural tag") as caught:
            answer_format(tmp_path, "hermes").constraint(HEADER, use, StructuredOutputs(structural_tag="{}"))
        assert caught.value.param == "tools"


@pytest.mark.parametrize("name", BOTH)
def test_the_parser_reads_what_a_tag_accepts(accepts: Accepts, tmp_path: Path, name: str) -> None:
    one = answer_format(tmp_path, name)
    assert accepts(one, BOTH[name], "required")
    assert parse(one, [BOTH[name]]) == [("weather", '{"city": "Paris"}'), ("now", "{}")]


def test_a_format_of_its_own_cannot_be_demanded(tmp_path: Path) -> None:
    field = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": "{content}"}
    template = {"start_anchor": HEADER, "fields": {"content": {}, "tool_calls": field}}
    with pytest.raises(UnsupportedFeature, match="--tool-call-parser"):
        AnswerFormat(template, None, "the test").constraint(HEADER, parse_tool_use(TOOLS, "required"))


def test_schemas_that_are_too_large(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {f"property {n}": {"type": "string"} for n in range(9000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    one = AnswerFormat.load(tmp_path, chat_template("hermes"))
    assert one is not None
    with pytest.raises(InvalidRequest, match="too large") as caught:
        one.constraint(HEADER, parse_tool_use(tools, "required"))
    assert caught.value.param == "tools"
