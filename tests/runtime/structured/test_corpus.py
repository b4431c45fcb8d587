"""Answers to 200 JSON schemas validate, checked by another library."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.source import prepare_source
from radixkv.wire.structured_outputs import StructuredOutputs
from support.grammar_walks import Walker, tiny_vocabulary
from support.json_schemas import Schema, corpus

MAX_TOKENS = 300


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(tiny_vocabulary(), n_threads=1, cache_bytes=64 << 20)


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(tiny_vocabulary())


def compiled(schema: Schema, compiler: Compiler) -> Grammar:
    source = prepare_source(StructuredOutputs(json=json.dumps(schema)))
    return Grammar(compiler.compile(source))


@pytest.mark.parametrize("n_walks", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_every_answer_that_ends_validates_and_the_others_are_valid_beginnings(
    compiler: Compiler, walker: Walker, n_walks: int
) -> None:
    schemas = corpus()
    assert len(schemas) == 200
    n_ended = 0
    for index, schema in enumerate(schemas):
        grammar = compiled(schema, compiler)
        validator = Draft202012Validator(schema)
        for seed in range(n_walks):
            walk = walker.walk(grammar, random.Random(f"{index} {seed}"), MAX_TOKENS)
            replayed = grammar.new_matcher()
            assert all(map(replayed.accept, walk.ids)), walk.text
            assert replayed.has_ended == walk.has_ended
            if walk.has_ended:
                # xgrammar takes the UTF-8 of half a surrogate pair for a character.
                value = json.loads(walk.text.decode(errors="surrogatepass"))
                error = next(validator.iter_errors(value), None)
                assert error is None, f"{walk.text!r} is not valid by {schema}: {error}"
                n_ended += 1
    assert n_ended > 0.9 * n_walks * len(schemas)


def test_a_matcher_rejects_what_the_schema_rejects_and_goes_on(compiler: Compiler) -> None:
    vocabulary = tiny_vocabulary()
    grammar = compiled({"type": "integer", "minimum": 10, "maximum": 99}, compiler)
    ids = {token: one for one, token in enumerate(vocabulary.tokens)}
    matcher = grammar.new_matcher()

    assert not matcher.accept(ids[b"a"])
    assert not matcher.accept(ids[b"0"])
    assert matcher.accept(ids[b"4"])
    assert not matcher.is_complete
    assert not matcher.accept(vocabulary.eos_token_ids[0])
    assert matcher.accept(ids[b"2"])
    assert matcher.is_complete
    assert not matcher.accept(ids[b"2"])
    assert not matcher.has_ended
    assert matcher.accept(vocabulary.eos_token_ids[0])
    assert matcher.has_ended
    assert not matcher.accept(ids[b"2"])
    assert not matcher.accept(vocabulary.eos_token_ids[0])


def test_special_tokens_and_control_characters_never_enter_strings(compiler: Compiler, walker: Walker) -> None:
    # Names of special tokens are ordinary text in JSON strings; the tokens themselves are not.
    vocabulary = tiny_vocabulary()
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^.*$"}):
        grammar = compiled(schema, compiler)
        matcher = grammar.new_matcher()
        quote = vocabulary.tokens.index(b'"')
        assert matcher.accept(quote)
        assert not any(matcher.accept(one) for one, token in enumerate(vocabulary.tokens) if token == b"")
        assert not matcher.accept(vocabulary.tokens.index(b"\t"))
        assert not matcher.accept(vocabulary.tokens.index(b"\n"))
        assert matcher.accept(quote)


@pytest.mark.parametrize(
    ("shortest", "longest"), [(0, 0), (0, 3), (2, 3), (3, 3), (2, None), (0, 128), (100, 129), (129, None)]
)
def test_a_string_is_as_long_as_it_may_be(shortest: int, longest: int | None, compiler: Compiler) -> None:
    length = {"minLength": shortest} | ({} if longest is None else {"maxLength": longest})
    matcher = compiled({"type": "string", **length}, compiler).new_matcher()
    quote, letter, space = (tiny_vocabulary().tokens.index(text) for text in (b'"', b"a", b" "))
    assert matcher.accept(quote)
    for n_letters in range(shortest + 5 if longest is None else longest):
        if n_letters < shortest:
            assert not matcher.accept(quote)
        assert matcher.accept(letter if n_letters % 2 else space)
    if longest is not None:
        assert not matcher.accept(letter)
    assert matcher.accept(quote)
