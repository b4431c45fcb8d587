"""msgspec's complaints about a body, in the words of JSON."""

from __future__ import annotations

import re

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "object": "an object",
    "array": "a list",
}
_EXPECTED = re.compile(r"Expected `([^`]+)`( [<>]=? -?\d+)?(?:, got `([^`]+)`)?(?: - at (.+))?")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def worded(complaint: str) -> str:
    """Which field is wrong, what it is and what it must be; other complaints stay as they are."""
    if missing := _MISSING.fullmatch(complaint):
        return f"{missing[1]} is missing; give it"
    found = _EXPECTED.fullmatch(complaint)
    if found is None:
        return complaint
    expected, limit, got, place = found.groups()
    must = " or ".join(_KINDS.get(kind, kind) for kind in expected.split(" | "))
    where = (
        "the body" if place is None else place.replace("`key` in", "a key of").replace("`", "").replace("$.", "")
    )
    if got is None:
        return f"{where} must be {must}{limit or ''}"
    return f"{where} is {_KINDS.get(got, got)}; it must be {must}{limit or ''}"
