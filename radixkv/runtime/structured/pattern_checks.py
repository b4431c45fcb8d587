"""Checks that strings with a pattern cannot leave their quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from radixkv.errors import shortened
from radixkv.runtime.structured.refusals import refusal
from radixkv.runtime.structured.utf8_patterns import utf8_pattern

_PLACE = re.compile(
    r"^.*(Regex parsing error at position \d+|EBNF parser error at line \d+, column \d+): ", re.DOTALL
)
"""A place in the rewritten pattern, which says nothing about the given one."""


def check_patterns(schema: Any) -> None:
    """Raises ``InvalidRequest`` for a pattern in a prepared schema that xgrammar would let leave its JSON string,
    or that has no meaning.

    xgrammar builds an automaton of most patterns, without the characters that JSON strings have as escapes only. If
    it cannot, because the pattern needs such characters or repeats too often, it allows them as they are.
    """
    import xgrammar  # takes seconds: the runtime imports this module for the type of sources

    for pattern in {*_patterns(schema)}:
        text = json.dumps({"type": "string", "pattern": utf8_pattern(pattern)})
        try:
            grammar = xgrammar.Grammar.from_json_schema(text)
        except RuntimeError as error:
            raise refusal(f"the pattern {shortened(pattern)}: {_PLACE.sub('', str(error))}") from None
        if "json_string=true" not in str(grammar):
            raise refusal(f"the pattern {shortened(pattern)} is too long, or needs characters that JSON escapes")


def _patterns(schema: Any) -> Iterator[str]:
    """Yields the patterns of strings and names in a prepared schema."""
    match schema:
        case {"enum": list()}:
            return
        case {"type": "string", "pattern": pattern}:
            yield pattern
        case dict():
            if schema.get("type") == "object":
                yield from schema.get("patternProperties", {})
            for one in schema.values():
                yield from _patterns(one)
        case list():
            for one in schema:
                yield from _patterns(one)
