"""Translation of msgspec's validation errors to JSON terms."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
_NO_CHOICE = re.compile(r"Invalid enum value .*? - at (.+)", re.DOTALL)
_OUT_OF_RANGE = re.compile(r"(?:Number|Integer value) out of range(?: - at (.+))?")
_MISSING = re.compile(r"Object missing required field `(\w+)`(?: - at (.+))?")


def describe_validation_error(message: str, choices: Sequence[str] = ()) -> str:
    """Returns which field is wrong, what it is and what it must be; leaves other messages as they are.

    Args:
        message: of msgspec.
        choices: the values that the field may have, if these are a few texts.
    """
    if choices and (no_choice := _NO_CHOICE.fullmatch(message)):
        return f"{_where(no_choice[1])} must be {' or '.join(choices)}"
    if missing := _MISSING.fullmatch(message):
        within = f"{_where(missing[2])}." if missing[2] else ""
        return f"{within}{missing[1]} is missing; give it"
    if out_of_range := _OUT_OF_RANGE.fullmatch(message):
        return f"{_where(out_of_range[1])} is a number out of range; it must be between -1e308 and 1e308"
    match = _EXPECTED.fullmatch(message)
    if match is None:
        return message
    expected, limit, got, path = match.groups()
    must = " or ".join(_KINDS.get(kind, kind) for kind in expected.split(" | "))
    if got is None:
        return f"{_where(path)} must be {must}{limit or ''}"
    return f"{_where(path)} is {_KINDS.get(got, got)}; it must be {must}{limit or ''}"


def _where(path: str | None) -> str:
    if path is None:
        return "the body"
    return path.replace("`key` in", "a key of").replace("`", "").replace("$.", "")
