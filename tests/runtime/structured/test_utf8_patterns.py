"""Strings with patterns have the texts that ``re`` matches, and no bytes that are no UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.source import prepare_source
from radixkv.wire.structured_outputs import StructuredOutputs
from support.cases import covering
from support.grammar_walks import tiny_vocabulary
from support.json_schemas import closed

PATTERNS = [
    ".",
    ".{2}",
    "(a|.)b",
    "[^a]",
    r"[^\d\s-]",
    r"[^\W]|\u00e9",
    r"\S",
    r"\D",
    r"\W",
    r"[\W\d]",
    "[à-ü]",
    "[é-\u4e00]",
    r"[\u0391-\u03c9\u4e00-\u9fa5_-]",
    "[\u3040-\U0001f600]",
    r"[^\u4e00-\u9fff]",
    r"[\x20-\uffff]",
    r"[.\]^-]",
    r"[a-f0-9\-.]",
    r"[a\-z]",
    "é|\U0001f600",
    r"\.\[",
    r"[\w-]",
]
LETTERS = sorted(
    {
        *map(chr, range(0x20, 0x7F)),
        *(
            chr(one + step)
            for one in (0x80, 0xE0, 0xE9, 0xFC, 0x391, 0x3C9, 0x7FF, 0x800, 0x3040, 0x4E00, 0x9FA5, 0x9FFF)
            for step in (-1, 0, 1)
        ),
        *map(chr, (0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F5FF, 0x1F600, 0x1F601, 0x10FFFF)),
    }
    - set('"\\')
)
NO_UTF8 = [
    *(
        b"\x80",
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x80",
        b"\xe0\x9f",
        b"\xed\xa0",
        b"\xed\xbf",
        b"\xf0\x80",
        b"\xf0\x8f",
    ),
    *(b"\xf4\x90", b"\xf5", b"\xff"),
]
ENDLESS = "^(.{0,200}x){0,200}$"
"""A pattern of which xgrammar makes no automaton: it would allow quotes in the string."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(tiny_vocabulary(), n_threads=1, cache_bytes=64 << 20)


def source_of(schema: Any, style: str | None) -> StructuredOutputs:
    """Returns a schema as an answer's, or as that of a part of a structural tag in a style."""
    if style is None:
        return StructuredOutputs(json=json.dumps(schema))
    part = {"type": "json_schema", "json_schema": schema, "style": style}
    return StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": part}))


def accepted(grammar: Grammar, text: bytes, compiler: Compiler) -> int:
    """Returns how many leading bytes of a text a grammar accepts."""
    ids = {token: one for one, token in enumerate(compiler.vocabulary.tokens) if len(token) == 1}
    matcher = grammar.new_matcher()
    return next(
        (place for place in range(len(text)) if not matcher.accept(ids[text[place : place + 1]])), len(text)
    )


@pytest.mark.parametrize(("pattern", "style"), covering(PATTERNS, [None, "json"]))
def test_a_pattern_has_its_letters_and_only_utf8(pattern: str, style: str | None, compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(source_of({"type": "string", "pattern": pattern}, style))))
    matcher = re.compile(pattern, re.ASCII)
    for letter in LETTERS:
        for text in (letter, letter + "b", ".["):
            answer = json.dumps(text, ensure_ascii=False).encode()
            is_accepted = accepted(grammar, answer, compiler) == len(answer)
            assert is_accepted == (matcher.fullmatch(text) is not None), text
    for wrong in NO_UTF8:
        assert accepted(grammar, b'"' + wrong, compiler) <= len(wrong), wrong


@pytest.mark.parametrize(
    "pattern",
    [
        "a([-ab]*b)?",
        "(ab*)?",
        "(a+b)??",
        "a(-b+)?",
        "((b|ab?c?){2,}-)?",
        "(bc*|a){1,}",
        "(bc*|a){2,}?",
        "b|c|b{1,2}",
        "^(b|(?:c|(a|b{1,2})))$",
        "(?:a|b)?",
        "(?P<name>a+c)?",
        "a{0,}b",
        r"\(?a\)?",
        "[(]a?",
        "^a|b$",
    ],
)
def test_loops_and_alternatives_have_the_texts_that_re_matches(pattern: str, compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(source_of({"type": "string", "pattern": pattern}, None))))
    matcher = re.compile(pattern)
    for letters in (letters for length in range(5) for letters in product("abc-", repeat=length)):
        text = "".join(letters)
        answer = json.dumps(text).encode()
        is_accepted = accepted(grammar, answer, compiler) == len(answer)
        assert is_accepted == (matcher.fullmatch(text) is not None), text


@pytest.mark.parametrize("pattern", [r"\S", r"[\S]", r"[^\s]", "[^\\sa]", r"[\S\d]", "."])
def test_what_is_white_space_somewhere_is_no_other_letter(pattern: str, compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(source_of({"type": "string", "pattern": pattern}, None))))
    spaces = "\u2028\u2029" if pattern == "." else "\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    for letter in spaces:
        assert accepted(grammar, f'"{letter}"'.encode(), compiler) < len(f'"{letter}"'.encode()), letter
    for letter in "bé\u1681\u200b\u3001":
        assert accepted(grammar, f'"{letter}"'.encode(), compiler) == len(f'"{letter}"'.encode()), letter


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": "object", "patternProperties": {"^.$": {}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": "[^a]"}},
    ],
)
def test_lengths_and_names_are_utf8(schema: Any, compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(source_of(schema, None))))
    start = b'"' if schema["type"] == "string" else b'{"'
    for wrong in NO_UTF8:
        assert accepted(grammar, start + wrong, compiler) < len(start + wrong), wrong
    assert accepted(grammar, start + "é".encode(), compiler) == len(start) + 2


@pytest.mark.parametrize(
    "pattern",
    ["[b-a]", "[a", "[]", r"[a-\d]", r"[\ud800-\udfff]", r"\ud83d", r"[^\x00-\u{10ffff}]", "(?i)yes"],
)
def test_patterns_without_a_meaning_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"the pattern {pattern!r} has")):
        prepare_source(source_of({"type": "string", "pattern": pattern}, None))


def parts(schema: Any, **keys: Any) -> Iterator[Any]:
    """Yields structural tags with a schema of the arguments of a call, in each notation of JSON."""
    arguments = closed(x=schema)
    for style in ({}, {"style": "json"}, {"is_one_line": True}, {"style": "gemma"}):
        content = {"type": "json_schema", "json_schema": arguments, **style, **keys}
        yield {"format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    if not keys:
        structure = {"begin": "<f>", "schema": arguments, "end": "</f>"}
        yield {"structures": [structure], "triggers": ["<f>"]}


@pytest.mark.parametrize("pattern", [ENDLESS, 'a"b'])
def test_a_pattern_of_arguments_that_could_leave_its_string_is_refused(pattern: str) -> None:
    for tag in parts({"type": "string", "pattern": pattern}):
        with pytest.raises(InvalidRequest, match=r"is too long, or needs.*in the part that begins with '<f>'"):
            prepare_source(StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", **tag})))


def test_arguments_whose_pattern_is_not_enforced_may_be_any_object_where_that_is_allowed() -> None:
    for tag in parts({"type": "string", "pattern": ENDLESS}, or_any_object=True):
        text = json.dumps({"type": "structural_tag", **tag})
        prepared = json.loads(prepare_source(StructuredOutputs(structural_tag=text)).text)
        assert prepared["format"]["content"]["json_schema"] == {"type": "object", "additionalProperties": {}}


@pytest.mark.parametrize("pattern", ["a{", "é)", "*a", r"a\b", "(?<=a)b"])
def test_a_pattern_that_cannot_be_enforced_is_named(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"the pattern {pattern!r}")) as error:
        prepare_source(source_of({"type": "string", "pattern": pattern}, None))
    assert re.search("position|column", str(error.value)) is None, "places in the rewritten pattern mean nothing"
