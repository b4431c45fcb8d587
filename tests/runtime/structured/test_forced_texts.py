"""Texts that a grammar forces are found where they are short, and nothing looks for long ones."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from radixkv.checkpoints import resolve
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.forced_texts import MAX_CHARACTERS, forces_short_texts
from radixkv.runtime.structured.matcher import Grammar, MaskFiller, Matcher
from radixkv.runtime.structured.source import Source, prepare_source
from radixkv.runtime.structured.spelling import MAX_BYTES, Spelling
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens, unpack_tokens
from radixkv.wire.structured_outputs import StructuredOutputs
from support.grammar_walks import Walker, allowed_ids, tiny_vocabulary
from support.json_schemas import closed, corpus

VOCABULARY = tiny_vocabulary()
STRING = {"type": "string"}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY, n_threads=1, cache_bytes=64 << 20)


def json_of(schema: Any) -> StructuredOutputs:
    return StructuredOutputs(json=json.dumps(schema))


def repeated(schema: Any, n: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": n, "maxItems": n}


def doubled(n: int) -> dict[str, Any]:
    """Returns a schema of n definitions, each of which has the next one twice."""
    pairs = {f"r{i}": closed(a={"$ref": f"#/$defs/r{i + 1}"}, b={"$ref": f"#/$defs/r{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/r0", "$defs": pairs | {f"r{n}": {"const": "ab"}}}


def tagged(content: dict[str, Any]) -> StructuredOutputs:
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}
    return StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": tags}))


def after(text: str) -> StructuredOutputs:
    """Returns a structural tag that comes after a text."""
    before, tag = {"type": "const_string", "value": text}, {"type": "const_string", "value": "a"}
    return StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": tag, "before": before}))


TEXT = {"type": "const_string", "value": "x"}
SAME_NAME_OFTEN = {"type": "object", "patternProperties": {"^ab$": {"const": "ab"}}, "minProperties": 1 << 20}
DOUBLED_RULES = "root ::= r0 r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30 ::= "ab"'
NODE = {"$ref": "#/$defs/node", "$defs": {"node": closed(next={"anyOf": [{"$ref": "#/$defs/node"}, STRING]})}}


@pytest.mark.parametrize(
    "spec",
    [
        json_of(closed(name=STRING, age={"type": "integer"}, tags={"type": "array", "items": STRING})),
        json_of(closed(**{f"field_{index}": STRING for index in range(200)})),
        json_of({"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 3, "$defs": {"x": {"enum": ["a"]}}}),
        json_of(doubled(4)),
        StructuredOutputs(json_object=True),
        StructuredOutputs(choice=("yes", "no")),
        StructuredOutputs(regex="[0-9]{3}-[a-z]{4}"),
        StructuredOutputs(regex=r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}"),
        json_of(
            closed(a={"type": "string", "pattern": r"^v?\d+(\.\d+){0,2}$"}, b={"pattern": "^(red|green|blue)$"})
        ),
        tagged({"type": "json_schema", "json_schema": closed(name=STRING)}),
        tagged({"type": "grammar", "grammar": 'root ::= "a" | "b"'}),
        json_of(closed(**{f"field_{index}": {"type": "string", "minLength": 128} for index in range(50)})),
        json_of(closed(name={"type": "string", "minLength": 500}, code={"type": "string", "minLength": 1 << 20})),
        json_of(closed(**{"$defs": STRING, "$ref": STRING, "enum": STRING, "minItems": {"const": 1 << 20}})),
        json_of({"const": {"$ref": "#/$defs/nowhere", "minItems": 1 << 20}}),
        json_of({"enum": ["{9000}", "b"]}),
        after("xy"),
        tagged({"type": "sequence", "elements": [{"type": "star", "content": TEXT}, {**TEXT, "value": "y" * 200}]}),
        StructuredOutputs(choice=("{9000}", 'a "b" | \\', "größe")),
    ],
)
def test_these_force_short_texts(spec: StructuredOutputs) -> None:
    assert forces_short_texts(prepare_source(spec))


@pytest.mark.parametrize(
    "spec",
    [
        json_of(doubled(30)),
        json_of(closed(a=STRING, b=doubled(30)["$defs"]["r30"], c={"const": "x" * (MAX_CHARACTERS + 1)})),
        json_of(repeated(repeated(repeated({"const": "ab"}, 40), 40), 40)),
        json_of(NODE),
        StructuredOutputs(regex="((a{100}){100}){100}"),
        StructuredOutputs(grammar=DOUBLED_RULES),
        StructuredOutputs(grammar='root ::= "(" root ")" | "a"'),
        StructuredOutputs(choice=("a" * (MAX_CHARACTERS + 1),)),
        tagged({"type": "grammar", "grammar": DOUBLED_RULES}),
        tagged({"type": "json_schema", "json_schema": doubled(30)}),
        tagged(
            {"type": "repeat", "min": 1 << 20, "max": 1 << 20, "content": {"type": "const_string", "value": "a"}}
        ),
        tagged({"type": "const_string", "value": {"$ref": "#/$defs/nowhere"}}),
        StructuredOutputs(grammar='root ::= ("ab"{ 9000 }){ 9000 }'),
        StructuredOutputs(grammar='root ::= ("ab"{ # often\n9000}){9000}'),
        StructuredOutputs(grammar=r'root ::= Regex("((ab)\u007b9000})\u007b9000}")'),
        tagged({"type": "grammar", "grammar": 'root ::= ("ab"{ 9000 }){ 9000 }'}),
        StructuredOutputs(regex="(" * 99 + "a" + "){9999}" * 99),
        StructuredOutputs(regex="x?" * 200 + "x" * 200),
        StructuredOutputs(regex="(x*x*)*" + "x" * 100),
        StructuredOutputs(regex="(x?){100}x{100}"),
        StructuredOutputs(regex="([x]*[x]*)*[x]{100}"),
        json_of({"type": "string", "pattern": "(x*x*)*" + "x" * 100}),
        StructuredOutputs(regex=r"^\.{128}(\.{128}){128}$"),
        StructuredOutputs(regex="((ab){0000000000128}){0000000000128}"),
        json_of({"const": {"$defs": "x" * 200_000}}),
        json_of(closed(a=STRING, b={"enum": [{"$defs": {"c": "x" * 200_000}}]})),
        json_of(closed(**{"$defs": repeated({"const": "ab"}, 20_000)})),
        json_of(closed(**{"$ref": {"const": "x" * 200_000}, "enum": repeated({"const": "ab"}, 20_000)})),
        json_of({"const": "\u0001" * 16_000}),
        json_of({"const": {"\u0001" * 16_000: 1}}),
        json_of(closed(**{"\u0001" * 16_000: STRING})),
        tagged({"type": "qwen_xml_parameter", "json_schema": SAME_NAME_OFTEN}),
        json_of(repeated({"type": "number", "minimum": 1e300, "maximum": 1e300}, 100)),
        tagged({"type": "json_schema", "json_schema": {"const": {"$defs": "x" * 200_000}}}),
        after("x" * (MAX_CHARACTERS + 1)),
        tagged(
            {"type": "sequence", "elements": [{"type": "star", "content": TEXT}, {**TEXT, "value": "x" * 2000}]}
        ),
    ],
)
def test_these_might_force_long_ones(spec: StructuredOutputs) -> None:
    assert not forces_short_texts(prepare_source(spec))


def text_of(ids: list[int]) -> bytes:
    return b"".join(VOCABULARY.tokens[one] for one in ids)


def test_what_is_forced_is_the_beginning_or_the_end_of_each_token_that_may_come(compiler: Compiler) -> None:
    """Along random answers to many schemas; forced texts go on as the answer does."""
    walker, filler = Walker(VOCABULARY), MaskFiller(1)
    mask = np.zeros((1, VOCABULARY.n_mask_words), np.int32)
    n_forced = n_short = 0
    for index, schema in enumerate(corpus()[::4]):
        source = prepare_source(json_of(schema))
        n_short += forces_short_texts(source)
        if not forces_short_texts(source):
            continue
        grammar = Grammar(compiler.compile(source), compiler.spelling)
        ids = walker.walk(grammar, random.Random(index), 60).ids
        matcher = grammar.new_matcher()
        for at, token in enumerate(ids):
            text = text_of(unpack_tokens(matcher.forced(16)))
            n_forced += bool(text)
            filler.fill([matcher], mask)
            pieces = [VOCABULARY.tokens[one] for one in allowed_ids(mask[0]) if text]
            assert all(piece and (text.startswith(piece) or piece.startswith(text)) for piece in pieces)
            behind = text_of(ids[at:])
            assert text.startswith(behind) or behind.startswith(text)
            assert matcher.accept(token)
    assert n_short > 40
    assert n_forced > 200


def test_a_grammar_whose_texts_may_be_long_is_not_asked(compiler: Compiler) -> None:
    matcher = Grammar(compiler.compile(prepare_source(StructuredOutputs(grammar=DOUBLED_RULES)))).new_matcher()
    assert matcher.forced(4) == b""


def forced_after(matcher: Matcher, text: bytes) -> bytes:
    assert matcher.n_allowed(pack_tokens([])) == 0
    for at in range(len(text)):
        assert matcher.accept(VOCABULARY.tokens.index(text[at : at + 1]))
    return text_of(unpack_tokens(matcher.forced(16)))


@pytest.mark.parametrize(
    ("choices", "begun", "forced"),
    [
        (("größe",), b"", "größe".encode()),
        (("größe",), b"gr\xc3", b"\xb6\xc3\x9fe"),
        (("é", "è"), b"", b"\xc3"),
        (("日本", "日曜"), b"\xe6", b"\x97\xa5\xe6"),
        (("ab", "abc"), b"a", b"b"),
        (("ab", "abc"), b"ab", b""),
        (("ab", "cd"), b"", b""),
    ],
)
def test_a_forced_text_may_begin_and_end_within_a_character(
    compiler: Compiler, choices: tuple[str, ...], begun: bytes, forced: bytes
) -> None:
    source = prepare_source(StructuredOutputs(choice=choices))
    assert forced_after(Grammar(compiler.compile(source), compiler.spelling).new_matcher(), begun) == forced


def test_a_forced_text_has_the_tokens_of_the_tokenizer() -> None:
    tokenizer, spelling = Tokenizer.load(resolve("tiny").folder), Spelling(VOCABULARY)
    for text in ('{"name": "', ', "date_of_birth": ', ' "größe": {"total": ', "hello, the whole story", "<|x|>\n"):
        assert spelling.spell(text.encode()) == tokenizer.encode(text, adds_special_tokens=False)


def test_a_text_is_spelled_up_to_what_no_token_has() -> None:
    spelling = Spelling(Vocabulary([b"a", b"b", b"ab", b"ba", b"", b"aba"], (4,)))
    assert unpack_tokens(spelling.spell(b"abab")) == [2, 2]
    assert unpack_tokens(spelling.spell(b"aba?ab")) == [5]
    assert unpack_tokens(spelling.spell(b"?a")) == []
    assert unpack_tokens(spelling.spell(b"")) == []


def test_a_compiler_reads_all_tokens_before_the_first_text_is_spelled() -> None:
    """Requests would wait while it reads them."""
    vocabulary = Vocabulary([b"a", b"b", b"ab", b""], (3,))
    spelling = Compiler(vocabulary, n_threads=1, cache_bytes=1 << 20).spelling
    vocabulary.tokens.clear()
    assert unpack_tokens(spelling.spell(b"aba")) == [2, 0]


def test_a_slow_search_is_the_last_one_of_its_grammar(compiler: Compiler) -> None:
    """An ambiguous pattern of 1,200 characters takes 80 ms a search."""
    slow = Grammar(compiler.compile(Source("regex", "x?" * 400 + "x" * 400)), compiler.spelling)
    first, second = slow.new_matcher(), slow.new_matcher()
    assert text_of(unpack_tokens(first.forced(16)))[:1] == b"x"
    assert first.forced(16) == second.forced(16) == slow.new_matcher().forced(16) == b""


def test_few_tokens_of_a_long_text_are_returned(compiler: Compiler) -> None:
    source = prepare_source(StructuredOutputs(choice=("x" * 1000,)))
    matcher = Grammar(compiler.compile(source), compiler.spelling).new_matcher()
    assert len(unpack_tokens(matcher.forced(5))) == 5
    assert len(text_of(unpack_tokens(matcher.forced(1000)))) == MAX_BYTES
