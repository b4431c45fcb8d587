"""Compiles specifications with xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import xgrammar

from radixkv.runtime.structured.gemma_arguments import QUOTE, STYLE, gemma_grammar
from radixkv.runtime.structured.refusals import refusal
from radixkv.runtime.structured.source import ANY_OBJECT, Source, written_schemas
from radixkv.runtime.structured.spelling import Spelling
from radixkv.runtime.structured.utf8_patterns import with_utf8_patterns
from radixkv.runtime.structured.vocabulary import Vocabulary

_CONTROL_CHARACTER = re.compile(rb"[\x00-\x1f]")
_EBNF_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
"""A text or a class of characters in the notation in which xgrammar prints grammars."""
_CHARACTERS = r"[^\"\\\r\n]"
"""xgrammar's class of the characters of a string with a length."""
_PRINTABLE_CHARACTERS = r"[^\0-\x1f\"\\\r\n]"


class Compiler:
    """Compiles sources for one vocabulary. Thread-safe; compiling lets other threads run."""

    def __init__(self, vocabulary: Vocabulary, *, n_threads: int, cache_bytes: int) -> None:
        """Takes a fifth of a second for 128,000 tokens.

        Args:
            vocabulary: the tokens.
            n_threads: processors that one compilation may use.
            cache_bytes: size of the cache of masks that similar rules of several grammars share.
        """
        self.vocabulary = vocabulary
        self.spelling = Spelling(vocabulary)
        self._quote_token = vocabulary.mark_id(QUOTE)
        self._compiler = _open(vocabulary.tokens, vocabulary.eos_token_ids, n_threads, cache_bytes)
        # JSON on one line has no control characters, but xgrammar allows them in strings with a length.
        printable = [b"" if _CONTROL_CHARACTER.search(token) else token for token in vocabulary.tokens]
        self._json_compiler = _open(printable, vocabulary.eos_token_ids, n_threads, cache_bytes)

    def warm_up(self) -> None:
        """Compiles the rules that nearly every JSON schema has. Takes 50 ms for 128,000 tokens."""
        self.compile(Source("json", ANY_OBJECT))

    def compile(self, source: Source) -> xgrammar.CompiledGrammar:
        """Compiles a source, which may take any time and memory.

        Raises:
            InvalidRequest: xgrammar refuses it.
        """
        try:
            match source.language:
                case "json":
                    # One space after commas and colons: where any white space is allowed, models may stall in it.
                    schema = json.dumps(with_utf8_patterns(json.loads(source.text)))
                    return self._json_compiler.compile_json_schema(schema, any_whitespace=False)
                case "regex":
                    return self._compiler.compile_regex(source.text)
                case "grammar":
                    return self._compiler.compile_grammar(source.text)
            return self._compiler.compile_structural_tag(self._structural_tag(source))
        except (RuntimeError, ValueError, TypeError) as error:  # what C++ and its bindings raise
            raise refusal(str(error)) from None

    def _structural_tag(self, source: Source) -> str:
        """Returns a structural tag with xgrammar's keys only."""
        tag = _with_utf8_patterns(json.loads(source.text))
        for part in written_schemas(tag):
            grammar = _grammar_of(part, self._quote_token)
            part.clear()
            part |= {"type": "grammar", "grammar": grammar}
        if source.before:
            tag["format"] = {"type": "sequence", "elements": [json.loads(source.before), tag["format"]]}
        return json.dumps(tag)


def _with_utf8_patterns(tag: Any) -> Any:
    """Returns a structural tag in whose JSON schemas patterns match UTF-8 only."""
    match tag:
        case {"json_schema": schema}:
            return tag | {"json_schema": with_utf8_patterns(schema)}
        case {"begin": str(), "schema": schema, "end": str()}:
            return tag | {"schema": with_utf8_patterns(schema)}
        case dict():
            return {name: _with_utf8_patterns(one) for name, one in tag.items()}
        case list():
            return [_with_utf8_patterns(one) for one in tag]
    return tag


def _open(
    tokens: Sequence[bytes], eos_token_ids: Sequence[int], n_threads: int, cache_bytes: int
) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(
        list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(eos_token_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=n_threads, cache_limit_bytes=cache_bytes)


def _grammar_of(part: Mapping[str, Any], quote_token: int | None) -> str:
    """Returns the EBNF of one of ``written_schemas``."""
    if part.get("style") == STYLE:
        return gemma_grammar(part["json_schema"], quote_token)
    ebnf = str(xgrammar.Grammar.from_json_schema(json.dumps(part["json_schema"]), any_whitespace=False))
    return _EBNF_LITERAL.sub(_without_control_characters, ebnf)


def _without_control_characters(literal: re.Match[str]) -> str:
    return _PRINTABLE_CHARACTERS if literal[0] == _CHARACTERS else literal[0]
