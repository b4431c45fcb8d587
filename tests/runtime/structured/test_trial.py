"""One trial, and the random answer that it follows."""

from __future__ import annotations

import os
from itertools import product
from string import ascii_lowercase
from typing import Any, cast

import msgspec
import pytest

from radixkv.errors import InvalidRequest
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.messages import TrialLimits, TrialResult
from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.trial import follow, run_trial
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs


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


def test_a_failure_of_the_trial_is_not_a_refusal() -> None:
    reader, writer = os.pipe()
    no_compiler = cast(Any, None)
    if (pid := os.fork()) == 0:
        run_trial(StructuredOutputs(regex="a"), no_compiler, TrialLimits(1 << 30, 1 << 20, 1), 9.0, writer)
    os.close(writer)
    result = msgspec.json.decode(os.read(reader, 1 << 16), type=TrialResult)
    os.close(reader)
    os.waitpid(pid, 0)
    assert (result.source, result.refusal) == (None, "")
    assert result.failure.startswith("AttributeError: ")
