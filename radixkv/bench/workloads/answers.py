"""Answers: whether they are right, and what a session keeps of them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from radixkv.bench.workloads.problems.problem import MARK, Problem, result_of, without_grouping

_BEFORE, _BEHIND = r"(?<![\w-])(?<!\d[.:])", r"(?!\w)(?![.:]\d)"
"""Where a word or number may begin, and where it may end."""
_NUMBER = re.compile(rf"{_BEFORE}-?\$?(?:\d+(?:\.\d+)?|\.\d+){_BEHIND}")

Check = Callable[[Sequence[str]], bool]
"""``Request.is_right``: takes the choices' texts."""


def right_result(problem: Problem, said: str = "") -> Check | None:
    """Whether the first choice, read behind what of the answer was ``said`` before, gives the problem's result.

    Numbers are compared as numbers, words in any case. None: the problem has no result.
    """
    right = _result(problem.answer)
    return None if right is None else lambda texts: _result(said + texts[0]) == right


def mostly_right_result(problem: Problem) -> Check | None:
    """Whether most choices that give a result give the problem's; of equally many, those count that came first."""
    right = _result(problem.answer)

    def check(texts: Sequence[str]) -> bool:
        votes = Counter(result for result in map(_result, texts) if result is not None)
        return bool(votes) and votes.most_common(1)[0][0] == right

    return None if right is None else check


def right_beginning(answer: str) -> Check:
    """Whether the first choice begins with this answer; its end of sequence is ignored, so more may follow."""
    return lambda texts: texts[0].strip().startswith(answer)


def right_call(call: str) -> Check:
    """Whether the first choice begins with JSON of the same value as this call."""
    right = json.loads(call)

    def check(texts: Sequence[str]) -> bool:
        try:
            return bool(json.JSONDecoder().raw_decode(texts[0].strip())[0] == right)
        except (ValueError, RecursionError):
            return False

    return check


def right_mention(problem: Problem) -> Check | None:
    """As ``right_result``; a first choice without the mark is right if its first line has the result in it.

    For problems that come without worked examples, from which a model could learn to give the mark.
    """
    right, check = _result(problem.answer), right_result(problem)
    if right is None or check is None:
        return None
    return lambda texts: check(texts) if MARK in texts[0] else _mentions(kept_line(texts[0]), right)


def kept_line(text: str, right: str | None = None) -> str:
    """What was answered before the chatter of an ignored end of sequence: ``right``, or else the first line."""
    line = text.strip().partition("\n")[0]
    return right if right is not None and line.startswith(right) else line


def _result(text: str) -> float | str | None:
    result = result_of(text)
    return None if result is None else _value(result)


def _mentions(line: str, right: float | str) -> bool:
    """Whether it is in the line, not as a part of another word or number."""
    line = without_grouping(line)
    if isinstance(right, str):
        return re.search(f"{_BEFORE}{re.escape(right)}{_BEHIND}", line.casefold()) is not None
    return any(_value(number.replace("$", "")) == right for number in _NUMBER.findall(line))


def _value(result: str) -> float | str:
    try:
        number = float(result)
    except ValueError:
        return result.casefold()
    return number if math.isfinite(number) else result.casefold()
