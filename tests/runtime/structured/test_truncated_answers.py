"""A matcher that has lost tokens, or was asked about others, goes on like one that never had them."""

from __future__ import annotations

import json
import random
from itertools import takewhile

import numpy as np
import pytest

from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar, MaskFiller, Matcher
from radixkv.runtime.structured.source import prepare_source
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import pack_tokens
from radixkv.wire.structured_outputs import StructuredOutputs
from support.grammar_walks import Walker, tiny_vocabulary
from support.json_schemas import MadeSchema, closed

VOCABULARY = tiny_vocabulary()
NESTED = closed(name={"type": "string", "maxLength": 12}, at={"type": "array", "items": {"type": "integer"}})
SPECIFICATIONS = {
    "regex": StructuredOutputs(regex="(ab|abc|[a-c]{2,5}d)*e?"),
    "number": StructuredOutputs(regex="-?[0-9]+(\\.[0-9]{1,3})?"),
    "choice": StructuredOutputs(choice=("the cat", "the cat sat", "größe", "", "日本")),
    "object": StructuredOutputs(json_object=True),
    "schema": StructuredOutputs(json=json.dumps(NESTED)),
    "grammar": StructuredOutputs(grammar='root ::= "(" root ")" | [a-z]*'),
    **{f"made {seed}": StructuredOutputs(json=json.dumps(MadeSchema(seed).root())) for seed in (2, 3, 5)},
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY, n_threads=1, cache_bytes=8 << 20)


def state(matcher: Matcher) -> tuple[object, ...]:
    """Returns all that shows of a matcher, its parser's states included."""
    mask = np.zeros((1, VOCABULARY.n_mask_words), np.int32)
    MaskFiller(1).fill([matcher], mask)
    inner = str(matcher.xgrammar_matcher._debug_print_internal_state())
    return mask.tobytes(), matcher.n_tokens, matcher.has_ended, matcher.is_complete, inner


def follow(grammar: Grammar, ids: list[int]) -> Matcher:
    """Returns a new matcher that has accepted the tokens."""
    matcher = grammar.new_matcher()
    assert all(map(matcher.accept, ids))
    return matcher


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_it_goes_on_as_if_it_never_had_them(compiler: Compiler, name: str) -> None:
    grammar, walker = Grammar(compiler.compile(prepare_source(SPECIFICATIONS[name]))), Walker(VOCABULARY)
    choices = random.Random(name)
    n_ended = 0
    for _ in range(12):
        walk = walker.walk(grammar, choices, 40)
        matcher = follow(grammar, walk.ids)
        n_ended += matcher.has_ended
        for _ in range(6):
            n_left = choices.randint(0, matcher.n_tokens)
            matcher.truncate(n_left)
            assert state(matcher) == state(follow(grammar, walk.ids[:n_left]))
            matcher.accept(VOCABULARY.eos_token_ids[0])
            matcher.truncate(n_left)
            n_more = choices.randint(0, 8)
            assert all(map(matcher.accept, walk.ids[n_left : n_left + n_more]))
            assert state(matcher) == state(follow(grammar, walk.ids[: n_left + n_more]))
    assert n_ended, "some of the answers have ended before"


def n_followed(matcher: Matcher, ids: list[int]) -> int:
    """Returns how many of the tokens a matcher accepts before its end."""
    return sum(1 for _ in takewhile(lambda one: matcher.accept(one) and not matcher.has_ended, ids))


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_what_is_asked_between_tokens_changes_nothing(compiler: Compiler, name: str) -> None:
    """After questions, tokens and steps back in any order, all is as in a matcher that was asked nothing."""
    grammar = Grammar(compiler.compile(prepare_source(SPECIFICATIONS[name])), compiler.spelling)
    walker, choices = Walker(VOCABULARY), random.Random(name)
    ends = VOCABULARY.eos_token_ids
    for _ in range(12):
        ids = walker.walk(grammar, choices, 40).ids
        matcher = grammar.new_matcher()
        for _ in range(30):
            n = matcher.n_tokens
            match choices.randrange(5):
                case 0:
                    matcher.truncate(choices.randint(0, n))
                case 1:
                    assert all(map(matcher.accept, ids[n : n + choices.randint(0, 5)]))
                case 2:
                    forced = matcher.forced(16)
                    assert matcher.n_allowed(forced) == len(forced) // TOKEN_BYTES
                case 3:
                    right = [one for one in ids[n : n + choices.randint(0, 12)] if one not in ends]
                    assert matcher.n_allowed(pack_tokens(right)) == len(right)
                case 4:
                    mixed = ids[n : n + choices.randint(0, 6)] + choices.choices(range(len(VOCABULARY.tokens)), k=3)
                    assert matcher.n_allowed(pack_tokens(mixed)) == n_followed(follow(grammar, ids[:n]), mixed)
            assert state(matcher) == state(follow(grammar, ids[: matcher.n_tokens]))


def test_nothing_comes_after_the_end(compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(StructuredOutputs(choice=("a",)))), compiler.spelling)
    a, eos = VOCABULARY.tokens.index(b"a"), VOCABULARY.eos_token_ids[0]
    matcher = follow(grammar, [a])
    assert matcher.forced(4) == b""
    assert matcher.n_allowed(pack_tokens([eos])) == 0, "the end is no draft"
    assert matcher.accept(eos)
    assert matcher.forced(4) == b""
    assert matcher.n_allowed(pack_tokens([a])) == 0
    assert state(matcher) == state(follow(grammar, [a, eos]))


def test_a_refused_token_takes_nothing_away(compiler: Compiler) -> None:
    grammar = Grammar(compiler.compile(prepare_source(StructuredOutputs(regex="ab*"))))
    a, b = VOCABULARY.tokens.index(b"a"), VOCABULARY.tokens.index(b"b")
    matcher = follow(grammar, [a, b])
    assert not matcher.accept(a)
    matcher.truncate(2)
    assert state(matcher) == state(follow(grammar, [a, b]))
    matcher.truncate(1)
    assert not matcher.accept(a), "the first token was accepted once"
    assert state(matcher) == state(follow(grammar, [a]))
