"""Patterns rewritten so that xgrammar's automata have the texts that the patterns match, in UTF-8.

xgrammar builds an automaton of bytes for the pattern of a JSON string. Three of its steps go wrong:

- Of a range of letters whose UTF-8 differs in length, or that has surrogates within, it allows bytes that are no
  UTF-8, such as ``e0 80``. So such a range becomes an alternative of ranges without these. In one class it would
  merge them again.
- ``?`` connects the beginning of a group with its end. Where one of them is in a loop, the loop can be left there:
  ``(a+b)?`` would match ``a``. ``{0,1}`` is right. ``{2,}`` goes back to one end of a group that may have several,
  so such a group gets one end, by ``()``.
- Equal states become one, and so do all last states, in one pass: where a state is among both, states become one
  that differ, and ``b|(?:c|(a|b{1,2}))`` would match ``cb``. With ``()`` after the pattern there is one last state.
"""

from __future__ import annotations

import re
from typing import Any

from radixkv.errors import InvalidRequest, shortened

_LENGTHS = ((0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
"""First and last letter of each range beyond ASCII that may be one range of bytes; surrogates are in none."""
_LAST = 0x10FFFF
_LAST_ASCII = 0x7F

_Ranges = list[tuple[int, int]]
"""Ranges of letters, each with its first and last one."""

_DIGITS: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: _Ranges = [(0x9, 0xD), (0x20, 0x20)]
"""What xgrammar takes for white space."""
_ALL_SPACES: _Ranges = [
    *((0x9, 0xD), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
"""What is white space in ECMAScript, ``re`` or Unicode."""
_NEWLINES: _Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_CONTROL = {"0": 0, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}

_CODE = r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]{1,6}\}|\\x\{[0-9A-Fa-f]{1,6}\}"
_QUANTIFIER = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
"""A quantifier, and whether it is lazy, which changes nothing."""
_PIECE = re.compile(rf"{_CODE}|\\c[A-Za-z]|\\.|\(\?|{_QUANTIFIER.pattern}|[^\\]", re.DOTALL)
_MEMBER = re.compile(rf"{_CODE}|\\c[A-Za-z]|\\.|[^\\]", re.DOTALL)


def with_utf8_patterns(schema: Any) -> Any:
    """Returns a prepared JSON schema whose patterns are those of ``utf8_pattern``. O(size)."""
    match schema:
        case {"enum": list()}:
            return schema
        case {"type": "string", "pattern": pattern}:
            return schema | {"pattern": utf8_pattern(pattern)}
        case {"type": "object", "patternProperties": dict(names)}:
            others = {keyword: one for keyword, one in schema.items() if keyword != "patternProperties"}
            by_pattern = {utf8_pattern(name): with_utf8_patterns(one) for name, one in names.items()}
            return with_utf8_patterns(others) | {"patternProperties": by_pattern}
        case dict():
            return {keyword: with_utf8_patterns(one) for keyword, one in schema.items()}
        case list():
            return [with_utf8_patterns(one) for one in schema]
    return schema


def utf8_pattern(pattern: str) -> str:
    """Returns a pattern in ASCII that must match a whole text, of which xgrammar's automaton is right. O(length).

    Other letters become escapes: xgrammar lets quotes into strings if a pattern has them as they are.

    Raises:
        InvalidRequest: a class of characters does not end, has no letter, or has a range that does not rise; or
            half a surrogate pair stands for itself; or there is a flag.
    """
    if pattern.startswith("(?i"):
        raise _refusal(pattern, "the flag (?i), which no grammar enforces; write classes such as [Aa]")
    parts: list[str] = []
    groups: list[int] = []
    """Where in the parts the open groups begin."""
    repeated = 0
    """Where in the parts begins what a quantifier would repeat."""
    place = 0
    while (found := _PIECE.match(pattern, place)) is not None:
        piece, place = found[0], found.end()
        if found[1] is not None:
            _repeat(parts, repeated, found[1])
            continue
        repeated = groups.pop() if piece == ")" and groups else len(parts)
        if piece in ("(", "(?"):
            groups.append(len(parts))
        if piece == "[":
            end, ranges = _read_class(pattern, place)
            written = pattern[place - 1 : end]
            is_kept = written[1] != "^" and ranges and all(high <= _LAST_ASCII for _, high in ranges)
            parts.append(written if is_kept else _alternatives(ranges, pattern))
            place = end
        elif piece == ".":
            parts.append(_alternatives(_others(_NEWLINES), pattern))
        elif piece in _NEGATED:
            parts.append(_alternatives(_NEGATED[piece], pattern))
        elif (code := _code_of(piece)) > _LAST_ASCII:
            parts.append(_alternatives([(code, code)], pattern))
        elif (piece, found.start()) not in (("^", 0), ("$", len(pattern) - 1)):
            parts.append(piece)
    return f"({''.join(parts)}{pattern[place:]})()"


def _repeat(parts: list[str], repeated: int, quantifier: str) -> None:
    """Appends a quantifier of the parts from ``repeated`` on."""
    match quantifier:
        case "?":
            quantifier = "{0,1}"
        case "{0,}":
            quantifier = "*"
        case "{1,}":
            quantifier = "+"
        case _ if quantifier.endswith(",}"):
            parts[repeated:] = ["(", *parts[repeated:], "())"]
    parts.append(quantifier)


def _read_class(pattern: str, place: int) -> tuple[int, _Ranges]:
    """Reads a class of characters after its bracket; returns the place after it, and its letters."""
    is_negated = pattern.startswith("^", place)
    place += is_negated
    ranges: _Ranges = []
    first: int | None = None
    """The letter before, which may begin a range."""
    is_range = False
    while (found := _MEMBER.match(pattern, place)) is not None:
        member, place = found[0], found.end()
        if member == "]":
            ranges += [(0x2D, 0x2D)] if is_range else []
            return place, _others(ranges) if is_negated else ranges
        if member == "-" and first is not None and not is_range:
            is_range = True
            continue
        letters = (_IN_OTHERS if is_negated else _LETTERS).get(member)
        if letters is not None and not is_range:
            ranges += letters
            first = None
            continue
        code = _code_of(member)
        low = first if is_range and first is not None else code
        if letters is not None or low > code:
            raise _refusal(pattern, f"a range that does not rise or ends with {member}")
        ranges.append((low, code))
        first, is_range = None if is_range else code, False
    raise _refusal(pattern, "a class of characters that does not end")


def _code_of(member: str) -> int:
    if len(member) == 1:
        return ord(member)
    kind, digits = member[1], member[2:].strip("{}")
    if kind in "xu" and digits:
        return int(digits, 16)
    if kind == "c" and digits:
        return ord(digits) & 31
    return _CONTROL.get(kind, ord(kind))


def _others(ranges: _Ranges) -> _Ranges:
    """Returns the ranges of all other letters, in order."""
    found, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, _LAST)] if start <= _LAST else found


_NEGATED = {r"\D": _others(_DIGITS), r"\W": _others(_WORD), r"\S": _others(_ALL_SPACES)}
_LETTERS = {r"\d": _DIGITS, r"\w": _WORD, r"\s": _SPACES} | _NEGATED
"""Letters of an escape. Some white space is in none."""
_IN_OTHERS = _LETTERS | {r"\s": _ALL_SPACES, r"\S": _others(_SPACES)}
"""The same in a class of all other letters."""


def _alternatives(ranges: _Ranges, pattern: str) -> str:
    """Returns a pattern of any letter of some ranges of a pattern."""
    classes = [
        "".join(
            f"{_escaped(max(low, start))}-{_escaped(min(high, end))}"
            for low, high in ranges
            if low <= end and high >= start
        )
        for start, end in ((0, _LAST_ASCII), *_LENGTHS)
    ]
    if not any(classes):
        raise _refusal(pattern, "a place where no letter may stand, such as half a surrogate pair")
    return f"({'|'.join(f'[{one}]' for one in classes if one)})"


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code <= _LAST_ASCII else f"\\u{code:04x}" if code < 1 << 16 else f"\\u{{{code:x}}}"


def _refusal(pattern: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"the pattern {shortened(pattern)} has {problem}", param="structured_outputs")
