"""Calls and reasoning are found in every format, wherever the text is cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.parsers.answer_parser import compile_template
from radixkv.generation.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from radixkv.generation.parts import TextPart, ToolCallPart
from radixkv.generation.tools import ToolUse, parse_tool_use
from support.cases import covering, examples
from support.tool_formats import HEADER, SHOWN_BY, TOOLS, USE, answer_format, parse

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("weather", '{"city": "Paris"}')

HERMES: dict[str, tuple[str, list[Any]]] = {
    "no call": ("Hello there. \n", ["Hello there. \n"]),
    "white space before text": ("\n  Hello", ["\n  Hello"]),
    "one call": (CALL, [PARIS]),
    "white space around": (f"\n{CALL}\n", [PARIS]),
    "text before and after": (f"I look.\n\n{CALL}\nDone.", ["I look.", PARIS, "Done."]),
    "two calls": (f"{CALL}\n{CALL}", [PARIS, PARIS]),
    "two calls without a break": (CALL + CALL, [PARIS, PARIS]),
    "nested braces": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": {"c": [{}, {"d": "}"}]}}}}</tool_call>',
        [("f", '{"a": {"b": {"c": [{}, {"d": "}"}]}}}')],
    ),
    "braces in a string": (
        '<tool_call>{"name": "f", "arguments": {"command": "mkdir -p test/{a,b"}}</tool_call>',
        [("f", '{"command": "mkdir -p test/{a,b"}')],
    ),
    "escaped quotes": (
        r'<tool_call>{"name": "f", "arguments": {"a": "say \"hi\" \\"}}</tool_call>',
        [("f", r'{"a": "say \"hi\" \\"}')],
    ),
    "unicode": (
        r'<tool_call>{"name": "f", "arguments": {"a": "具体 🦜 \u00e9"}}</tool_call>',
        [("f", r'{"a": "具体 🦜 \u00e9"}')],
    ),
    "the end marker in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>y <tool_call> z"}}</tool_call>ok',
        [("f", '{"a": "x</tool_call>y <tool_call> z"}'), "ok"],
    ),
    "empty arguments": ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [("now", "{}")]),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
    "null arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")]),
    "arguments before the name": (
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
        [PARIS],
    ),
    "arguments encoded as a string": (
        r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>',
        [PARIS],
    ),
    "an id, and white space everywhere": (
        '<tool_call> { "id" : "1" , "name" : "weather" , "arguments" : {"city": "Paris"} } </tool_call>',
        [PARIS],
    ),
    "a brace too few": (
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>ok',
        [PARIS, "ok"],
    ),
    "a brace too many": ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}}</tool_call>', [PARIS]),
    "a list of calls": (
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now"}]</tool_call>',
        [("now", "{}"), ("now", "{}")],
    ),
    "an unknown function": ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', [("g", "{}")]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>!', ['<tool_call>{"arguments": {}}</tool_call>!']),
    "no JSON": ("a <tool_call>hello</tool_call> b", ["a <tool_call>hello</tool_call> b"]),
    "a name that is no text": ('<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
    "a marker that does not go on": ("a <tool_ca b <tool", ["a <tool_ca b <tool"]),
    "an end without a start": ("a </tool_call> b", ["a </tool_call> b"]),
    "a call without its end": (CALL.removesuffix("\n</tool_call>"), [PARIS]),
}
OTHERS: dict[str, tuple[str, str, list[Any]]] = {
    "mistral": (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        [PARIS, ("now", "{}")],
    ),
    "mistral's text": ("mistral", "Hi [TOOL", ["Hi [TOOL"]),
    "mistral with names outside": (
        "mistral_args",
        'Wait.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}',
        ["Wait.", PARIS, ("now", "{}")],
    ),
    "mistral with cut arguments": (
        "mistral_args",
        '[TOOL_CALLS]weather[ARGS]{"city": "Pa',
        ['[TOOL_CALLS]weather[ARGS]{"city": "Pa'],
    ),
    "llama": ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
    "llama with its tag": ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", "{}")]),
    "llama with two calls": (
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}',
        [("now", "{}"), PARIS],
    ),
    "llama's other JSON": ("llama3_json", '{"name": "Bob", "age": 3} or so', ['{"name": "Bob", "age": 3} or so']),
    "llama's later JSON": (
        "llama3_json",
        'It is {"name": "now", "parameters": {}}',
        ['It is {"name": "now", "parameters": {}}'],
    ),
    "gpt-oss": (
        "openai",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}',
        [PARIS],
    ),
    "gpt-oss with the recipient before the channel": (
        "openai",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        [PARIS],
    ),
    "gpt-oss with text and two calls": (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|><|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        ["I look.", PARIS, ("now", "{}"), "Done."],
    ),
    "gpt-oss with two texts": (
        "openai",
        "<|channel|>commentary<|message|>First. <|end|><|start|>assistant<|channel|>final<|message|>Last.",
        ["First. \nLast."],
    ),
    "gpt-oss's last text": (
        "openai",
        "<|channel|>final<|message|>a <|cha <b> to=functions.",
        ["a <|cha <b> to=functions."],
    ),
    "gpt-oss's text in a format": ("openai", "<|channel|>final <|constrain|>json<|message|>{}", ["{}"]),
    "gpt-oss without channels": ("openai", "Hello.", ["Hello."]),
    "gpt-oss in a channel of its own": (
        "openai",
        "<|channel|>other<|message|>Hello.",
        ["<|channel|>other<|message|>Hello."],
    ),
    "gpt-oss with cut arguments": (
        "openai",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Pa',
        ['<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Pa'],
    ),
    "qwen coder": (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=search>\n<parameter=count>\n3\n</parameter>\n<parameter=exact>\ntrue\n"
        '</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=note>\n12 <b>\n"é"\n</parameter>\n'
        "</function>\n</tool_call>\n",
        ["Sure.", ("search", '{"count": 3, "exact": true, "tags": ["a", "b"], "note": "12 <b>\\n\\"é\\""}')],
    ),
    "qwen coder with null, and a list as Python writes it": (
        "qwen3_coder",
        "<function=search>\n<parameter=count>\nnull\n</parameter>\n<parameter=tags>\n['a', 'b']\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n</function>",
        [("search", '{"count": null, "tags": ["a", "b"], "note": "null"}')],
    ),
    "qwen coder without arguments or outer tag": (
        "qwen3_coder",
        "<function=now>\n</function>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("now", "{}"), ("now", "{}")],
    ),
    "qwen coder in one line": (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>Done.",
        [PARIS, "Done."],
    ),
    "qwen coder with lines and marks in a text": (
        "qwen3_coder",
        "<function=search>\n<parameter=note>\n\n  a <parameter=b>\n</p>\n<p>\n\n</parameter>\n</function>",
        [("search", '{"note": "\\n  a <parameter=b>\\n</p>\\n<p>\\n"}')],
    ),
    "qwen coder without the ends of values": (
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=note>\na\n<parameter=count>\n3\n<parameter=tags>\n[]\n</function>"
        "\n</tool_call>",
        [("search", '{"note": "a", "count": 3, "tags": []}')],
    ),
    "qwen coder without the end of the call": (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n",
        [PARIS],
    ),
    "qwen coder with a function and arguments that are not offered": (
        "qwen3_coder",
        "<function=g>\n<parameter=a>\n3\n</parameter>\n</function>",
        [("g", '{"a": "3"}')],
    ),
    "qwen coder without a name": (
        "qwen3_coder",
        "a <tool_call>\n<function=>\n<function=a</function> <function=b\n",
        ["a <tool_call>\n<function=>\n<function=a</function> <function=b\n"],
    ),
    "gemma": (
        "gemma4",
        'Sure.<|tool_call>call:search{count:3,exact:true,note:<|"|>12 <b> {a:"é"}\n<|"|>,'
        'tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
        [
            "Sure.",
            ("search", '{"count": 3, "exact": true, "note": "12 <b> {a:\\"é\\"}\\n", "tags": ["a", "b"]}'),
        ],
    ),
    "gemma with two calls": (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        [PARIS, ("now", "{}")],
    ),
    "gemma with nested values, and words of Python": (
        "gemma4",
        '<|tool_call>call:f.g-h{a:{b:[1,-2.5e3,[],{}],<|"|>c d<|"|>:None},e:False,f:null}<tool_call|>ok',
        [("f.g-h", '{"a": {"b": [1, -2.5e3, [], {}], "c d": null}, "e": false, "f": null}'), "ok"],
    ),
    "gemma with texts in JSON's quotes": (
        "gemma4",
        r'<|tool_call>call:f{a:"say \"hi\" \q \u00e9",b:word}<tool_call|>',
        [("f", r'{"a": "say \"hi\" \\q \u00e9", "b": "word"}')],
    ),
    "gemma with the end's mark in a text": (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>x<tool_call|>y <|tool_call> <|"z<|"|>}<tool_call|>ok',
        [("f", '{"a": "x<tool_call|>y <|tool_call> <|\\"z"}'), "ok"],
    ),
    "gemma without the end of the call": ("gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>', [PARIS]),
    "gemma with a brace too few": (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|><tool_call|>ok',
        [PARIS, "ok"],
    ),
    "gemma with keys that have no values": (
        "gemma4",
        "<|tool_call>call:f{a:,b:{c},{d:1}}<tool_call|>",
        [("f", '{"a": null, "b": {"c": null}, "d": 1}')],
    ),
    "gemma without a name": (
        "gemma4",
        "a <|tool_call>call:{}<tool_call|> b",
        ["a <|tool_call>call:{}<tool_call|> b"],
    ),
    "gemma's text": ("gemma4", "a <tool_call|> <|tool", ["a <tool_call|> <|tool"]),
}
CASES = {name: ("hermes", *case) for name, case in HERMES.items()} | OTHERS


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnswerFormat]:
    folder = tmp_path_factory.mktemp("model")
    return {name: answer_format(folder, name) for name in SHOWN_BY}


def cut(text: str, places: set[int]) -> list[str]:
    ends = [*sorted(places), len(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found(formats: dict[str, AnswerFormat], case: str) -> None:
    format_name, text, expected = CASES[case]
    assert parse(formats[format_name], [text]) == expected
    assert parse(formats[format_name], list(text)) == expected


@pytest.mark.parametrize("case", CASES)
@examples(25)
@given(data=st.data())
def test_the_parts_do_not_depend_on_where_the_text_is_cut(
    formats: dict[str, AnswerFormat], case: str, data: st.DataObject
) -> None:
    format_name, text, expected = CASES[case]
    places = data.draw(st.sets(st.integers(0, len(text))))
    assert parse(formats[format_name], cut(text, places)) == expected


@examples(200)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["weather", "search", "f.g-h"]),
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", "}}"]),
                    lambda each: (
                        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
                    ),
                    max_leaves=5,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    is_ascii=st.booleans(),
    data=st.data(),
)
def test_any_arguments_come_through(
    formats: dict[str, AnswerFormat], calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, data: st.DataObject
) -> None:
    written = [json.dumps({"name": name, "arguments": found}, ensure_ascii=is_ascii) for name, found in calls]
    text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
    places = data.draw(st.sets(st.integers(0, len(text)), max_size=20))
    found = parse(formats["hermes"], cut(text, places))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


XML_ENDS = re.compile(r"</parameter>|</function>|^<parameter=", re.MULTILINE)
"""What ends a text in Qwen3-Coder's XML."""


@examples(200)
@given(
    calls=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "count": st.integers(),
                "exact": st.booleans(),
                "tags": st.lists(st.text(max_size=4).filter(lambda text: not XML_ENDS.search(text)), max_size=3),
                "note": st.lists(
                    st.sampled_from(["<", "/", "parameter", "=a>", "\n", "<tool_call>", "<p>", '"', "\\"])
                    | st.text()
                )
                .map("".join)
                .filter(lambda text: not XML_ENDS.search(text)),
            },
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_any_arguments_come_through_xml(
    formats: dict[str, AnswerFormat], calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    """As the chat templates of Qwen write them."""

    def written(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    text = "\n".join(
        "<tool_call>\n<function=search>\n"
        + "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in one.items())
        + "</function>\n</tool_call>"
        for one in calls
    )
    places = data.draw(st.sets(st.integers(0, len(text)), max_size=20))
    found = parse(formats["qwen3_coder"], cut(text, places))
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("search", one) for one in calls]


XML_PIECES = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "now", ">"]


@given(pieces=st.lists(st.sampled_from([*XML_PIECES, "<", "\n", " ", "note", "count", "3"])), data=st.data())
def test_no_xml_depends_on_the_cuts(
    formats: dict[str, AnswerFormat], pieces: list[str], data: st.DataObject
) -> None:
    text = "<function=search>" + "".join(pieces)
    places = data.draw(st.sets(st.integers(0, len(text))))
    whole = parse(formats["qwen3_coder"], [text])
    assert parse(formats["qwen3_coder"], cut(text, places)) == whole
    for name, arguments in (part for part in whole if isinstance(part, tuple)):
        assert name
        json.loads(arguments)


def gemma(value: Any) -> str:
    """Writes a value as Gemma 4's chat template does."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
        case list():
            return f"[{','.join(map(gemma, value))}]"
    return json.dumps(value)


GEMMA_TEXTS = st.lists(st.sampled_from([*'<|">,:{}[]\\', "<tool_call|>", "<|tool_call>"]) | st.text()).map("".join)
GEMMA_KEYS = st.text(alphabet="abc_1", min_size=1, max_size=4)


@examples(200)
@given(
    calls=st.lists(
        st.dictionaries(
            GEMMA_KEYS,
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | GEMMA_TEXTS.filter(lambda text: '<|"|>' not in text + "<"),
                lambda each: st.lists(each, max_size=3) | st.dictionaries(GEMMA_KEYS, each, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_any_arguments_come_through_gemmas_notation(
    formats: dict[str, AnswerFormat], calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = "".join(f"<|tool_call>call:search{gemma(one)}<tool_call|>" for one in calls)
    places = data.draw(st.sets(st.integers(0, len(text)), max_size=20))
    found = parse(formats["gemma4"], cut(text, places))
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("search", one) for one in calls]


@given(
    pieces=st.lists(st.sampled_from([*'{}[],:"\\ <', '<|"|>', "a", "3", "<tool_call|>", "<|tool_call>call:now{"])),
    data=st.data(),
)
def test_any_text_in_gemmas_notation_gives_json_wherever_it_is_cut(
    formats: dict[str, AnswerFormat], pieces: list[str], data: st.DataObject
) -> None:
    text = "<|tool_call>call:search{" + "".join(pieces)
    places = data.draw(st.sets(st.integers(0, len(text))))
    whole = parse(formats["gemma4"], [text])
    assert parse(formats["gemma4"], cut(text, places)) == whole
    for _, arguments in (part for part in whole if isinstance(part, tuple)):
        json.loads(arguments)


@given(text=st.text(alphabet='<tool_call>/{}[]":, \nname', max_size=60), data=st.data())
def test_no_text_fails_or_depends_on_the_cuts(
    formats: dict[str, AnswerFormat], text: str, data: st.DataObject
) -> None:
    places = data.draw(st.sets(st.integers(0, len(text))))
    for one in formats.values():
        assert parse(one, cut(text, places)) == parse(one, [text])


@pytest.mark.parametrize("format_name", SHOWN_BY)
@examples(25)
@given(data=st.data())
def test_a_cut_answer_is_a_prefix(formats: dict[str, AnswerFormat], format_name: str, data: st.DataObject) -> None:
    """A prefix of an answer never shows a call that the whole answer has not, nor changes its arguments."""
    cases = [
        case for case in CASES.values() if case[0] == format_name and any(isinstance(p, tuple) for p in case[2])
    ]
    _, text, expected = data.draw(st.sampled_from(cases))
    end = data.draw(st.integers(0, len(text)))
    found = [part for part in parse(formats[format_name], [text[:end]], is_cut=True) if isinstance(part, tuple)]
    whole = [part for part in expected if isinstance(part, tuple)]
    for (name, arguments), (whole_name, whole_arguments) in zip(found, whole, strict=False):
        assert name == whole_name
        assert arguments == whole_arguments or not _is_json(arguments)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSaint-Jean-de-Luz\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("format_name", "text", "n_pieces"),
    [
        ("hermes", CALL, len('{"city": "Paris"}')),
        ("qwen3_coder", XML_CALL, len("Saint-Jean-de-Luz")),
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>Saint-Jean-de-Luz<|"|>}<tool_call|>',
            len("Saint-Jean-de-Luz"),
        ),
    ],
)
def test_arguments_arrive_while_the_model_writes_them(
    formats: dict[str, AnswerFormat], format_name: str, text: str, n_pieces: int
) -> None:
    parser = formats[format_name].open_parser(HEADER, USE)
    assert parser is not None
    shown = [len(parser.feed(character)) for character in text]
    assert sum(shown) > n_pieces


def test_only_offered_tools_are_called(formats: dict[str, AnswerFormat]) -> None:
    assert formats["hermes"].open_parser(HEADER, ToolUse()) is None
    unwanted = parse_tool_use(TOOLS, "none")
    assert formats["hermes"].open_parser(HEADER, unwanted) is None


REASONING: dict[str, tuple[str, str, list[Any]]] = {
    "both": ("", "<think>\nI see.\n</think>\n\nHello.\n", [("think", "I see."), "Hello.\n"]),
    "begun in the prompt": ("<think>\n", "I see.\n</think>\n\nHello.", [("think", "I see."), "Hello."]),
    "begun at the prompt's very end": ("<think>", "I see.</think>Hello.", [("think", "I see."), "Hello."]),
    "ended in the prompt": ("<think>\n\n</think>\n\n", "Hello <think> there", ["Hello <think> there"]),
    "an indented text after it": ("", "<think>\nI see.\n</think> \n\n  Hello.", [("think", "I see."), "  Hello."]),
    "a space after it": ("<think>\n", "I see.</think> Paris", [("think", "I see."), " Paris"]),
    "ended in the prompt before a space": ("<think>\n\n</think>\n\n", " Paris", [" Paris"]),
    "nothing but a space after it": ("<think>\n", "I see.</think> ", [("think", "I see.")]),
    "none": ("", "Hello.", ["Hello."]),
    "named later": ("", "The tag <think> begins it.", ["The tag <think> begins it."]),
    "empty": ("", "<think>\n\n</think>\n\nHello.", ["Hello."]),
    "cut": ("", "<think>\nI se", [("think", "I se")]),
    "a call after it": ("<think>\n", f"I call.\n</think>\n\n{CALL}", [("think", "I call."), PARIS]),
    "a call named in it": ("<think>\n", f"I say {CALL} now</think>", [("think", f"I say {CALL} now")]),
}


@pytest.mark.parametrize("case", REASONING)
def test_reasoning_is_split_off(tmp_path: Path, case: str) -> None:
    prefill, text, expected = REASONING[case]
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    earlier = "<|im_start|>user\nwhat is <think>?<|im_end|>\n"
    for pieces in ([text], list(text)):
        assert parse(one, pieces, prompt=f"{earlier}{HEADER}{prefill}") == expected


ANALYSIS = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"
CHANNELS: dict[str, tuple[str, list[Any]]] = {
    "a text after it": (f"{ANALYSIS}<|channel|>final<|message|>Hello.<|return|>", [("think", "I see."), "Hello."]),
    "a call after it": (
        f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        [("think", "I see."), PARIS],
    ),
    "twice": (f"{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>Hello.", [("think", "I see.\nI see."), "Hello."]),
    "around a call": (
        f"{ANALYSIS} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|><|start|>assistant{ANALYSIS}",
        [("think", "I see."), ("now", "{}"), ("think", "I see.")],
    ),
    "a text after it that begins with a space": (
        f"{ANALYSIS}<|channel|>final<|message|> Paris<|return|>",
        [("think", "I see."), " Paris"],
    ),
    "a call named in it": (
        "<|channel|>analysis<|message|>I say to=functions.now<|message|>{}<|call|> now",
        [("think", "I say to=functions.now<|message|>{}<|call|> now")],
    ),
    "cut": ("<|channel|>analysis<|message|>I se", [("think", "I se")]),
    "cut before a text": (f"{ANALYSIS}<|channel|>fin", [("think", "I see.")]),
    "cut before a text in a format": (f"{ANALYSIS}<|channel|>final <|constrain|>js", [("think", "I see.")]),
    "cut before a call": (f"{ANALYSIS} to=functions.now<|channel|>commentary", [("think", "I see.")]),
    "cut at once": ("<|channel|>", []),
}


@pytest.mark.parametrize("case", CHANNELS)
def test_reasoning_in_a_channel_is_split_off(tmp_path: Path, case: str) -> None:
    text, expected = CHANNELS[case]
    one = answer_format(tmp_path, "openai", has_reasoning=True)
    for pieces in ([text], list(text)):
        assert parse(one, pieces) == expected


def test_a_channel_begun_in_the_prompt_goes_on(tmp_path: Path) -> None:
    one = answer_format(tmp_path, "openai", has_reasoning=True)
    assert parse(one, ["lo."], prompt=f"{HEADER}<|channel|>final<|message|>Hel") == ["lo."]


def test_reasoning_in_a_channel_may_stay_in_the_text_beside_calls(tmp_path: Path) -> None:
    parser = answer_format(tmp_path, "openai", has_reasoning=True).open_parser(HEADER, USE, has_reasoning=False)
    assert parser is not None
    parts = [*parser.feed(f"{ANALYSIS}<|channel|>final<|message|>Hello."), *parser.finish()]
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == (
        "<|channel|>analysis<|message|>I see.<|end|>\nHello."
    )


def test_reasoning_may_stay_in_the_text(tmp_path: Path) -> None:
    one = answer_format(tmp_path, "hermes", has_reasoning=True)
    assert one.open_parser(HEADER, ToolUse(), has_reasoning=False) is None
    assert one.open_parser(HEADER, ToolUse()) is not None


UNENDED = {
    "a name": "weather" + "x" * 3000,
    "white space": "\n" * 3000,
    "marks": "<" * 3000,
    "beginnings": "<parameter=" * 300,
    "text": "ab " * 1000,
}
BEGINNINGS = {
    "hermes": ["", "<tool_call>"],
    "qwen3_coder": ["", "<tool_call>", "<tool_call><function=", "<tool_call><function=weather></function>"],
    "mistral": ["", "[TOOL_CALLS]", "[TOOL_CALLS] ["],
    "mistral_args": ["", "[TOOL_CALLS]", "[TOOL_CALLS]weather[CALL_ID]"],
    "llama3_json": ["", " ", "<|python_tag|>"],
    "gemma4": ["", "<|tool_call>", "<|tool_call>call:"],
    "openai": [
        "",
        "<|channel|>",
        "<|channel|>commentary to=functions.",
        "<|channel|>commentary to=functions.weather ",
    ],
}


@pytest.mark.parametrize(
    ("name", "form"),
    covering([*UNENDED], [(one, beginning) for one, all_ in BEGINNINGS.items() for beginning in all_]),
)
def test_what_is_held_back_and_looked_at_again_with_each_token_is_short(name: str, form: tuple[str, str]) -> None:
    """Otherwise an answer takes time quadratic in its length."""
    format_name, beginning = form
    tools = next(one for one in TOOL_FORMATS if one.name == format_name)
    fields = {"content": {"content": "text"}, **REASONING_FORMATS[1].fields, **tools.fields}
    template = {"start_anchor": HEADER, "fields": fields}
    compiled = compile_template(template, has_tools=True, has_reasoning=True)
    parser = ResponseParser(compiled.template, prefix="")
    n_taken = 0
    for n_fed, piece in enumerate(beginning + UNENDED[name], 1):
        n_taken += sum(len(event.get("text", "")) for event in parser.feed(piece))
        assert n_fed - n_taken < 1000


def test_many_parameters_without_an_end_take_no_minutes(tmp_path: Path) -> None:
    parser = answer_format(tmp_path, "qwen3_coder").open_parser("", USE)
    assert parser is not None
    text = "<tool_call>\n<function=weather>\n" + "<parameter=city>\nx\n" * 20_000 + "</function>\n</tool_call>"
    parts = [*parser.feed(text), *parser.finish()]
    assert all(isinstance(part, ToolCallPart) for part in parts)
    arguments = "".join(part.arguments for part in parts if isinstance(part, ToolCallPart))
    assert json.loads(arguments) == {"city": "x"}
