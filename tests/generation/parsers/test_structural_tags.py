"""Structural tags accept what a request demands, and nothing else, as xgrammar reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.tools import parse_tool_use
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.source import prepare_source
from radixkv.runtime.structured.vocabulary import read_vocabulary
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from radixkv.wire.structured_outputs import SPECIAL_MARKS, StructuredOutputs
from support.small_tokenizers import byte_letters
from support.tool_formats import HEADER, TOOLS, USE, answer_format, chat_template, parse

EOS = "<eos>"
PARIS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
    "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
}
BOTH = {
    "hermes": PARIS["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": PARIS["qwen3_coder"] + "\n<tool_call>\n<function=now>\n\n</function>\n</tool_call>",
    "mistral": PARIS["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": PARIS["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
    "gemma4": PARIS["gemma4"] + "<|tool_call>call:now{}<tool_call|>",
}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
ONLY_NOW = [{"type": "function", "function": {"name": "now"}}]

Accepts = Callable[..., bool]


class Grammars:
    """Compiles constraints for a vocabulary of single bytes, whose marks are special tokens or not."""

    def __init__(self, folder: Path, *, has_special_marks: bool) -> None:
        marks = sorted(SPECIAL_MARKS)
        backend = byte_letters(special=[EOS, *(marks if has_special_marks else [])])
        if not has_special_marks:  # a mark that is added again is special no more
            backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
        backend.save(str(folder / "tokenizer.json"))
        self.tokenizer = Tokenizer.load(folder)
        assert len(self.tokenizer.special_ids(SPECIAL_MARKS)) == (len(marks) if has_special_marks else 0)
        vocabulary = read_vocabulary(folder, backend.get_vocab_size(), [backend.token_to_id(EOS)])
        self._compiler = Compiler(vocabulary, n_threads=1, cache_bytes=1 << 24)

    def accepts(self, constraint: StructuredOutputs, text: str) -> bool:
        """Returns whether a text is a whole answer."""
        matcher = Grammar(self._compiler.compile(prepare_source(constraint))).new_matcher()
        ids = unpack_tokens(self.tokenizer.encode(text + EOS, adds_special_tokens=False))
        return all(matcher.accept(token) for token in ids)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("plain"), has_special_marks=False)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("special"), has_special_marks=True)


@pytest.fixture
def accepts(grammars: Grammars) -> Accepts:
    """Returns a function that says whether a text is a whole answer to a request with these tools."""

    def accepts(
        one: AnswerFormat,
        text: str,
        *request: Any,
        tools: object = TOOLS,
        prompt: str = HEADER,
        text_format: StructuredOutputs | None = None,
        of: Grammars = grammars,
    ) -> bool:
        constraint = one.constraint(prompt, parse_tool_use(tools, *request), text_format)
        return constraint is None or of.accepts(constraint, text)

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


OBJECT, OWN_TAG = StructuredOutputs(json_object=True), {"type": "const_string", "value": "tag"}
THINK = f"{HEADER}<think>\n"


@pytest.mark.parametrize("marks", ["plain", "special"])
@pytest.mark.parametrize("tools", [{"tools": []}, {"tools": TOOLS}, {"tools": TOOLS, "choice": "none"}])
@pytest.mark.parametrize(("text_format", "text"), TEXT_FORMATS)
def test_a_format_begins_after_reasoning(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    marks: str,
    tools: dict[str, Any],
    text_format: StructuredOutputs,
    text: str,
) -> None:
    of: Grammars = request.getfixturevalue("grammars" if marks == "plain" else "special")
    one = answer_format(tmp_path, "hermes", has_reasoning=True, tokenizer=of.tokenizer)

    def accepts(answer: str, prompt: str = HEADER) -> bool:
        constraint = one.constraint(prompt, parse_tool_use(tools["tools"], tools.get("choice")), text_format)
        assert constraint is not None
        return of.accepts(constraint, answer)

    for thought in ("\nI see.\n", "", "a < b </ c {\n}", "日本 <b>"):
        assert accepts(f"<think>{thought}</think>\n\n{text}")
        assert accepts(f"\n<think>{thought}</think>\n{text}"), "some models begin with a new line"
        assert accepts(f"{thought}</think>{text}", THINK)
        assert accepts(f"{thought}</think>{text}", THINK.rstrip())
    assert accepts(text), "the model need not reason"
    assert accepts(text, f"{THINK}\n</think>\n\n"), "the prompt has ended the reasoning"
    assert accepts(text, f"{HEADER}The answer: "), "the prompt has begun the text"
    assert accepts(f" see.</think>\n{text}", f"{THINK}I"), "the prompt has begun the reasoning"
    for answer in ("", "Hello.", "<think>", f"<think>{text}", "<think>a</think>Hello.", f"{text}<think></think>"):
        assert not accepts(answer)
    assert not accepts(text, THINK)
    assert not accepts(f"<think></think>{text}", f"{THINK}\n</think>\n\n")


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag", "format": OWN_TAG},
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f>"],
        },
    ],
)
def test_a_structural_tag_of_the_request_begins_after_reasoning(accepts: Accepts, tmp_path: Path, tag: Any) -> None:
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    wanted = StructuredOutputs(structural_tag=tag)
    text, wrong = ("tag", "rag") if "format" in tag else ("a <f>3</f>", "a <f>b</f>")
    for answer, prompt in ((text, HEADER), (f"<think>{wrong}</think>{text}", HEADER), (f"a</think>{text}", THINK)):
        assert accepts(one, answer, tools=[], prompt=prompt, text_format=wanted)
    assert not accepts(one, f"a</think>{wrong}", tools=[], prompt=THINK, text_format=wanted)


def test_json_after_reasoning_is_on_one_line_without_control_characters(accepts: Accepts, tmp_path: Path) -> None:
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    short = {"type": "string", "maxLength": 8}
    schema = {"type": "object", "properties": {"a": short, "b": {"type": "string"}}, "required": ["a", "b"]}
    wanted = StructuredOutputs(json=schema)
    for text in ('{"a": "x", "b": "y"}', '{"a": "é日", "b": "[^\\"\\\\\\r\\n]"}'):
        assert accepts(one, f"<think></think>\n\n{text}", tools=[], text_format=wanted)
    for text in ('{"a":"x","b":"y"}', '{ "a": "x", "b": "y"}', '{"a": "\t", "b": "y"}', '{"a": "x", "b": "\t"}'):
        assert not accepts(one, f"<think></think>\n\n{text}", tools=[], text_format=wanted)
    const = StructuredOutputs(json={"const": r"[^\"\\\r\n]"})
    assert accepts(one, r'"[^\\\"\\\\\\r\\n]"', tools=[], text_format=const)


START, FINAL = "<|im_start|>assistant\n", "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'


@pytest.mark.parametrize("marks", ["grammars", "special"])
def test_channels(request: pytest.FixtureRequest, accepts: Accepts, tmp_path: Path, marks: str) -> None:
    of: Grammars = request.getfixturevalue(marks)
    one = answer_format(tmp_path, "openai", has_reasoning=True, tokenizer=of.tokenizer)
    for tools in ({"tools": []}, {"tools": TOOLS}):
        for before in ("", ANALYSIS, ANALYSIS * 2):
            for begin in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
                assert accepts(one, f'{before}{begin}{{"a": 1}}', text_format=OBJECT, of=of, **tools)
            assert not accepts(one, f"{before}{FINAL}Hello.", text_format=OBJECT, of=of, **tools)
        assert not accepts(one, '{"a": 1}', text_format=OBJECT, of=of, **tools)
        rest = f'thought<|end|><|start|>assistant{FINAL}{{"a": 1}}'
        begun = f"{HEADER}<|channel|>analysis<|message|>"
        assert accepts(one, rest, prompt=begun, text_format=OBJECT, of=of, **tools)
        assert accepts(one, '{"a": 1}', prompt=HEADER + FINAL, text_format=OBJECT, of=of, **tools)
    for answer in (CALL, ANALYSIS + CALL):
        assert accepts(one, answer, of=of, text_format=OBJECT)
        assert accepts(one, answer, "required", of=of)
        assert accepts(one, answer, of=of, tools=STRICT)
        assert not accepts(one, answer.replace("city", "town"), of=of, tools=STRICT)
        assert not accepts(one, answer, "none", of=of, text_format=OBJECT)
    for answer in (f"{ANALYSIS}{FINAL}Hello.", f"{FINAL}Hello."):
        assert not accepts(one, answer, "required", of=of)
        assert accepts(one, answer, of=of, tools=STRICT)


@pytest.mark.parametrize("marks", ["grammars", "special"])
def test_calls_of_gemma_4(request: pytest.FixtureRequest, accepts: Accepts, tmp_path: Path, marks: str) -> None:
    of: Grammars = request.getfixturevalue(marks)
    one = answer_format(tmp_path, "gemma4", has_reasoning=True, tokenizer=of.tokenizer)
    call, both, wrong = PARIS["gemma4"], BOTH["gemma4"], PARIS["gemma4"].replace("city", "town")
    thought = "<|channel>thought\nI see.\n<channel|>"
    for before in ("", thought):
        for choice in ("required", NAMED):
            assert accepts(one, before + call, choice, of=of)
            for answer in ("Hello.", before + wrong, f"Hello. {call}", call + wrong, f"{call}{before}Hello."):
                assert not accepts(one, answer, choice, of=of)
        assert accepts(one, before + both, "required", of=of)
        assert not accepts(one, before + both, NAMED, of=of)
        assert not accepts(one, before + both, "required", False, of=of)
        for answer in (f"{before}Hello.", before + call, f"{before}Sure. {both} Hello."):
            assert accepts(one, answer, tools=STRICT, of=of)
        for answer in (before + wrong, f"Sure. {both}{wrong}", before + call.replace("weather", "now")):
            assert not accepts(one, answer, tools=STRICT, of=of)
        assert accepts(one, f"{before}Sure. {call}", "auto", False, of=of)
        assert not accepts(one, before + both, "auto", False, of=of)
        for answer in (before + '{"a": 1}', before + both):
            assert accepts(one, answer, text_format=OBJECT, of=of)
        assert not accepts(one, f"{before}Hello.", text_format=OBJECT, of=of)
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ONLY_NOW}}
        assert accepts(one, f"{before}<|tool_call>call:now{{a:1}}<tool_call|>", choice, of=of)
        assert not accepts(one, before + call, choice, of=of)


def test_a_refused_schema_is_that_of_a_function(special: Grammars, accepts: Accepts, tmp_path: Path) -> None:
    one = answer_format(tmp_path, "gemma4", tokenizer=special.tokenizer)
    tool = {"name": "pick", "strict": True, "parameters": {"type": "object", "not": {}}}
    with pytest.raises(InvalidRequest, match="has not, which no grammar enforces.*begins with 'call:pick'"):
        accepts(one, "", tools=[*TOOLS, {"type": "function", "function": tool}], of=special)


def test_reasoning_of_its_own(accepts: Accepts, tmp_path: Path) -> None:
    fields = {"content": {}, "thinking": {"open": "<reason>", "close": "</reason>"}}
    config = {"response_template": {"start_anchor": HEADER, "fields": fields}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    one = AnswerFormat.load(tmp_path, None)
    assert one is not None
    assert accepts(one, '<reason>a</reason>\n{"a": 1}', tools=[], text_format=OBJECT)
    assert accepts(one, 'a</reason>{"a": 1}', tools=[], prompt=f"{HEADER}<reason>", text_format=OBJECT)
    fields["thinking"] = {"open_pattern": "<reason[0-9]>", "close": "</reason>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    one = AnswerFormat.load(tmp_path, None)
    assert one is not None
    with pytest.raises(UnsupportedFeature, match="--reasoning-parser"):
        one.constraint(HEADER, parse_tool_use([]), OBJECT)


@pytest.mark.parametrize("bot", ["<|bot|>", ""])
def test_a_template_that_opens_the_reasoning_without_another_header(
    accepts: Accepts, tmp_path: Path, bot: str
) -> None:
    shown = "{{ messages[-1].content }}{% if add_generation_prompt %}BOT<think>\n{% endif %}{# </think> #}"
    source = shown.replace("BOT", bot)
    template = ChatTemplate(source, {}, "the test")
    one = AnswerFormat.load(tmp_path, template)
    assert one is not None
    prompt = template.render([{"role": "user", "content": "Why </think>?"}])
    assert accepts(one, 'a</think>\n\n{"a": 1}', tools=[], prompt=prompt, text_format=OBJECT)
    assert not accepts(one, '{"a": 1}', tools=[], prompt=prompt, text_format=OBJECT)
    assert parse(one, ["I see.</think>\n\nHello."], prompt=prompt) == [("think", "I see."), "Hello."]


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


SWITCHES = {
    "on unless switched off": ("enable_thinking is not defined or enable_thinking", True),
    "off unless switched on": ("enable_thinking", False),
}


@pytest.mark.parametrize(("condition", "reasons"), SWITCHES.values(), ids=SWITCHES)
def test_reasoning_that_is_switched_off_does_not_come_before_a_format(
    accepts: Accepts, tmp_path: Path, condition: str, reasons: bool
) -> None:
    source = "{{ messages[-1].content }}{% if CONDITION %} Think.{% endif %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> #}"
    one = AnswerFormat.load(tmp_path, ChatTemplate(source.replace("CONDITION", condition), {}, "the test"))
    assert one is not None
    for wanted, may_reason in ((None, reasons), (True, True), (False, False)):
        variables = {} if wanted is None else {"enable_thinking": wanted}
        constraint = one.constraint(HEADER, parse_tool_use([]), OBJECT, variables)
        assert (constraint != OBJECT) == may_reason
        opened = one.constraint(THINK, parse_tool_use([]), OBJECT, variables)
        assert opened != OBJECT, "the prompt has begun it all the same"
