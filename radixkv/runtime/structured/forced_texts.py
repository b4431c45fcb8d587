"""Whether the texts that a specification forces are short enough to be looked for."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from radixkv.runtime.structured.source import Source

MAX_CHARACTERS = 1 << 14
"""Most characters of a specification whose forced texts are looked for. xgrammar takes 0.25 µs for each character
of one, and cannot be told to stop: twenty rules, each of which has the next one twice, force a million."""
_REPEATS = ("minItems", "minProperties", "min")
"""Keywords of schemas and structural tags that say how often something comes at least."""
_REPEATED = re.compile(r"\{\s*0*(\d{1,9})")
"""The same in patterns."""
_FREE = re.compile(
    r"(?:\\[dDwWS]|\.|\[(?!\^)[^\[\]\\]{0,40}?([0-9A-Za-z])-(?!\1)[0-9A-Za-z][^\[\]\\]{0,40}\]|\[\^[^\[\]\\-]{1,40}\])"
    r"(?:[*+?]|\{\d{1,9}(?:,\d{0,9})?\})*|(\\.)",
    re.DOTALL,
)
"""Any of several characters in patterns, however often, which force nothing; or an escape, which is kept."""
_VARIABLE = re.compile(r"[*+?|]|\{\s*\d+\s*,")
"""What a pattern may have in several ways."""
_SCHEMAS = ("json_schema", "schema")
"""Keywords of structural tags that have a JSON schema."""
_WAYS = frozenset(("or", "optional", "star", "plus", "repeat", "regex", "tags_with_separator"))
"""Types of parts of a structural tag that can be had in several ways."""
_SCALAR_CHARACTERS = 20
"""Whole numbers are hardly longer."""
_LITERAL = r'"(?:[^"\\]|\\.)*+"'
_CHOICE = re.compile(rf"\s*root\s*::=\s*{_LITERAL}(?:\s*\|\s*{_LITERAL})*+\s*")


def forces_short_texts(source: Source) -> bool:
    """Returns whether each text that must follow an answer's beginning is known to be short. O(length).

    A forced text is part of the specification, written out: with what its references refer to, and as often as it
    is repeated. That has no end where something contains itself.
    """
    try:
        match source.language:
            case "json":
                size = _of_schema(json.loads(source.text))
            case "structural_tag":
                size = sum(_of_tag(json.loads(text)) for text in (source.text, source.before) if text)
            case "regex":
                size = _of_pattern(source.text)
            case "grammar":
                size = _of_grammar(source.text)
    except (RecursionError, OverflowError):
        return False
    return size <= MAX_CHARACTERS


def _of_schema(schema: Any) -> float:
    """Returns the characters of a whole JSON schema that is written out; its references are to its ``$defs``."""
    definitions: dict[str, Any] = {}
    if isinstance(schema, dict) and isinstance(own := schema.get("$defs"), dict):
        definitions = {f"#/$defs/{name}": one for name, one in own.items()}
        schema = {keyword: one for keyword, one in schema.items() if keyword != "$defs"}
    return _of_tree(schema, definitions, {})


def _of_tree(node: Any, definitions: dict[str, Any], sizes: dict[str, float]) -> float:
    """Returns the characters of a part of a JSON schema or structural tag that is written out.

    Args:
        node: the part.
        definitions: what its references refer to.
        sizes: of the definitions that were met; infinite while it is being computed.
    """
    match node:
        case {"type": "grammar", "grammar": str(text)}:
            return _of_grammar(text)
        case dict():
            size = sum(
                len(keyword) + _of_keyword(keyword, one, definitions, sizes) for keyword, one in node.items()
            )
            return size * math.prod([max(1, n) for name in _REPEATS if isinstance(n := node.get(name), int)])
        case list():
            return sum(1 + _of_tree(one, definitions, sizes) for one in node)
        case str():
            return _of_text(node)
        case float():
            return _SCALAR_CHARACTERS + len(f"{node:.0f}")
    return _SCALAR_CHARACTERS


def _of_keyword(keyword: str, value: Any, definitions: dict[str, Any], sizes: dict[str, float]) -> float:
    """Returns the characters of what a keyword has. See ``_of_tree``."""
    match keyword, value:
        case "$ref", str():
            if value not in sizes:
                sizes[value] = math.inf
                if value in definitions:
                    sizes[value] = _of_tree(definitions[value], definitions, sizes)
            return sizes[value]
        case "const" | "enum", _:
            return len(json.dumps(value))
        case "properties", dict():
            return sum(_of_text(name) + _of_tree(one, definitions, sizes) for name, one in value.items())
        case "patternProperties", dict():
            return sum(_of_pattern(name) + _of_tree(one, definitions, sizes) for name, one in value.items())
        case "pattern", str():
            return _of_pattern(value)
        case _ if keyword in _SCHEMAS:
            return _of_schema(value)
    return _of_tree(value, definitions, sizes)


def _of_tag(tag: Any) -> float:
    """Returns how many characters a structural tag is worth.

    If parts of it can be had in several ways, xgrammar takes up to 60 ns times the square of the texts around them.
    """
    size = _of_tree(tag, {}, {})
    return max(size, _texts_of_tag(tag) ** 2 / 10) if _has_ways(tag) else size


def _texts_of_tag(node: Any) -> float:
    """Returns the characters of a structural tag's texts, without those in schemas."""
    match node:
        case str():
            return len(node)
        case list():
            return sum(map(_texts_of_tag, node))
        case dict():
            n_least = node.get("min")
            size = sum(_texts_of_tag(one) for keyword, one in node.items() if keyword not in _SCHEMAS)
            return size * max(1, n_least) if isinstance(n_least, int) else size
    return 0


def _has_ways(node: Any) -> bool:
    match node:
        case list():
            return any(map(_has_ways, node))
        case dict():
            parts = (one for keyword, one in node.items() if keyword not in _SCHEMAS)
            return node.get("type") in _WAYS or any(map(_has_ways, parts))
    return False


def _of_text(text: str) -> int:
    """Returns the characters of a text in JSON."""
    return len(json.dumps(text))


def _of_pattern(text: str) -> int:
    """Returns how many characters a pattern is worth, in which repeats may be nested.

    A search follows all ways at once, so each part that can be had in several ways multiplies its time.
    """
    if len(text) > MAX_CHARACTERS:
        return len(text)
    fixed = _FREE.sub(r"\2", text)
    repeats = math.prod([max(1, int(n)) for n in _REPEATED.findall(fixed)])
    n_variable = len(_VARIABLE.findall(fixed)) * repeats
    n_characters = min(len(json.dumps(fixed)) * repeats, MAX_CHARACTERS + 1)
    return math.prod([n_characters] * min(1 + n_variable, 4))


def _of_grammar(text: str) -> float:
    """Returns the characters of a choice of texts. Other grammars may repeat something, or have no end."""
    return len(text) if _CHOICE.fullmatch(text) else math.inf
