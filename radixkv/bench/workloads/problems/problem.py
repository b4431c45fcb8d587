"""Questions with checkable answers."""

from __future__ import annotations

import re

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """A question and its answer, which may have steps and ends in ``#### result``."""

    question: str
    answer: str


MARK = "####"
"""The mark of a result, at the beginning of a line of its own, as in GSM8K."""


def result_of(text: str) -> str | None:
    """Returns the first result in ``text``: what follows the mark on its line. None: there is no mark or no result.

    Commas between digits, a leading dollar sign and a final full stop are removed.
    """
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    line = rest.lstrip(" ").partition("\n")[0].strip()
    return without_grouping(line).lstrip("$").rstrip(".") or None


def without_grouping(text: str) -> str:
    """Returns ``text`` without commas between digits."""
    return re.sub(r"(?<=\d),(?=\d)", "", text)
