"""The random answer that a trial follows."""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase

import pytest

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.trial import follow
from radixkv.runtime.structured.vocabulary import Vocabulary


def check(vocabulary: Vocabulary, ebnf: str) -> None:
    compiler = Compiler(vocabulary, n_threads=1, cache_bytes=64 << 20)
    follow(Grammar(compiler.compile(Source("grammar", ebnf))), vocabulary)


def test_free_text_in_a_large_vocabulary_is_not_slow() -> None:
    words = ["".join(letters).encode() for letters in product(ascii_lowercase, repeat=4)]
    check(Vocabulary([*words, b""], (len(words),)), "root ::= [a-z]*")


@pytest.mark.parametrize("ebnf", ['root ::= "a"*', 'root ::= "a"'])
def test_an_answer_may_end_at_any_of_the_end_tokens(ebnf: str) -> None:
    check(Vocabulary([b"a", b"", b""], (1, 2)), ebnf)


def test_a_dead_end_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no token may come next"):
        check(Vocabulary([b"a", b""], (1,)), 'root ::= "aa" "b"')
