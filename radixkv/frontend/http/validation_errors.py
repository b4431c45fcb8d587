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
_OUT_OF_RANGE = re.compile(r"(?:Number|Integer value) out of range(?: - at (.+))?")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def worded(complaint: str) -> str:
    """Which field is wrong, what it is and what it must be; other complaints stay as they are."""
    if missing := _MISSING.fullmatch(complaint):
        return f"{missing[1]} is missing; give it"
    if beyond := _OUT_OF_RANGE.fullmatch(complaint):
        return f"{_where(beyond[1])} is a number out of range; it must be between -1e308 and 1e308"
    found = _EXPECTED.fullmatch(complaint)
    if found is None:
        return complaint
    expected, limit, got, place = found.groups()
    must = " or ".join(_KINDS.get(kind, kind) for kind in expected.split(" | "))
    if got is None:
        return f"{_where(place)} must be {must}{limit or ''}"
    return f"{_where(place)} is {_KINDS.get(got, got)}; it must be {must}{limit or ''}"


def _where(place: str | None) -> str:
    if place is None:
        return "the body"
    return place.replace("`key` in", "a key of").replace("`", "").replace("$.", "")
