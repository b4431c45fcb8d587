"""Questions whose answers can be checked."""

from __future__ import annotations

import re

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """A question, and its answer, which may have steps and ends in ``#### result``."""

    question: str
    answer: str


MARK = "####"
"""Stands before the result, on a line of its own, as in GSM8K."""


def result_of(text: str) -> str | None:
    """The first result that ``text`` gives: what follows the mark, to the end of its line; None without a mark.

    Commas between digits, a leading currency sign and a final full stop do not count.
    """
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    line = rest.lstrip(" ").partition("\n")[0].strip()
    return without_grouping(line).lstrip("$").rstrip(".") or None


def without_grouping(text: str) -> str:
    """Without the commas between digits."""
    return re.sub(r"(?<=\d),(?=\d)", "", text)
