"""Masks of several answers at once, against a plain definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar, MaskFiller, Matcher
from radixkv.runtime.structured.source import prepare_source
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs
from support.grammar_walks import allowed_ids, tiny_vocabulary

CHOICES = ("the cat", "the cat sat", "a dog", 'a "quoted" {one}', "größe", "", "line\nbreak", "日本")


def allowed_by_definition(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Returns the tokens with which a choice can still be reached, and the ends if one is reached."""
    choices = [one.encode() for one in CHOICES]
    return [
        one
        for one, token in enumerate(vocabulary.tokens)
        if (one in vocabulary.eos_token_ids and text in choices)
        or (token and any(choice.startswith(text + token) for choice in choices))
    ]


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    compiler = Compiler(tiny_vocabulary(), n_threads=1, cache_bytes=1 << 20)
    return Grammar(compiler.compile(prepare_source(StructuredOutputs(choice=CHOICES))))


def test_masks_of_choices_equal_their_definition(grammar: Grammar) -> None:
    vocabulary, filler, choices = tiny_vocabulary(), MaskFiller(2), random.Random(3)
    answers: list[tuple[Matcher, list[int]]] = [(grammar.new_matcher(), []) for _ in range(20)]
    ended = set()
    while any(not matcher.has_ended for matcher, _ in answers):
        # One row more than answers, one word more than tokens: neither is touched where it is beyond them.
        masks = np.full((len(answers) + 1, vocabulary.n_mask_words), 7, np.int32)
        filler.fill([matcher for matcher, _ in answers], masks)
        assert (masks[-1] == 7).all()
        for row, (matcher, ids) in enumerate(answers):
            if matcher.has_ended:
                assert (masks[row] == -1).all()
                continue
            allowed = allowed_ids(masks[row])
            text = b"".join(vocabulary.tokens[one] for one in ids)
            assert allowed == allowed_by_definition(vocabulary, text)
            ids.append(choices.choice(allowed))
            assert matcher.accept(ids[-1])
            if matcher.has_ended:
                ended.add(text.decode())
    assert len(ended) > 3
    assert ended <= set(CHOICES)


def test_a_token_that_is_not_allowed_ends_the_request_with_an_error_that_names_it(grammar: Grammar) -> None:
    matcher = grammar.new_matcher()
    token = next(one for one, text in enumerate(tiny_vocabulary().tokens) if text == b"z")
    assert not matcher.accept(token)
    error = matcher.rejection(token)
    assert error.code == "grammar_error"
    assert str(error) == f"the sampled token {token} is not one that structured_outputs allows here"


def test_rows_without_an_answer_allow_everything(grammar: Grammar) -> None:
    masks = np.zeros((3, tiny_vocabulary().n_mask_words), np.int32)
    MaskFiller(1).fill([None, grammar.new_matcher(), None], masks)

    assert (masks[[0, 2]] == -1).all()
    assert not (masks[1] == -1).all()


def test_an_answer_does_not_move_another_one(grammar: Grammar) -> None:
    vocabulary = tiny_vocabulary()
    first, second = grammar.new_matcher(), grammar.new_matcher()
    assert first.accept(vocabulary.tokens.index(b"a"))

    assert second.accept(vocabulary.tokens.index(b"t"))
    assert not first.accept(vocabulary.tokens.index(b"t"))
