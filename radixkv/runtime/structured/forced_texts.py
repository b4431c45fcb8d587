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
_REPEATS = ("minItems", "minProperties", "minLength", "min")
"""Keywords of schemas and structural tags that say how often something comes at least."""
_REPEATED = re.compile(r"\{(\d{1,9})")
"""The same in patterns."""
_SCALAR_CHARACTERS = 20
"""Numbers are hardly longer."""


def forces_short_texts(source: Source) -> bool:
    """Returns whether each text that must follow an answer's beginning is known to be short. O(length).

    A forced text is part of the specification, written out: with what its references refer to, and as often as it
    is repeated. That has no end where something contains itself.
    """
    try:
        match source.language:
            case "json":
                size = _of_tree(json.loads(source.text), {}, {})
            case "structural_tag":
                size = sum(_of_tree(json.loads(text), {}, {}) for text in (source.text, source.before) if text)
            case "regex":
                size = _of_text(source.text)
            case "grammar":
                size = _of_grammar(source.text)
    except RecursionError:
        return False
    return size <= MAX_CHARACTERS


def _of_tree(node: Any, definitions: dict[str, Any], sizes: dict[str, float]) -> float:
    """Returns the characters of a JSON schema or structural tag that is written out.

    Args:
        node: a part of it.
        definitions: what its references refer to.
        sizes: of the definitions that were met; infinite while it is being computed.
    """
    if isinstance(node, dict) and isinstance(own := node.get("$defs"), dict):
        definitions, sizes = {f"#/$defs/{name}": one for name, one in own.items()}, {}
    match node:
        case {"$ref": str(name)}:
            if name not in sizes:
                sizes[name] = math.inf
                sizes[name] = _of_tree(definitions[name], definitions, sizes) if name in definitions else math.inf
            return sizes[name]
        case {"type": "grammar", "grammar": str(text)}:
            return _of_grammar(text)
        case dict():
            size = sum(
                _of_text(name) + _of_tree(one, definitions, sizes) for name, one in node.items() if name != "$defs"
            )
            return size * math.prod([max(1, n) for name in _REPEATS if isinstance(n := node.get(name), int)])
        case list():
            return sum(1 + _of_tree(one, definitions, sizes) for one in node)
        case str():
            return _of_text(node)
    return _SCALAR_CHARACTERS


def _of_text(text: str) -> int:
    """Returns the characters of a text or pattern, in which repeats may be nested."""
    return len(text) * math.prod([max(1, int(n)) for n in _REPEATED.findall(text)])


def _of_grammar(text: str) -> float:
    """Returns the characters of a grammar with one rule, such as that of a choice; others may have no end."""
    return _of_text(text) if text.count("root") == text.count("::=") == 1 else math.inf
