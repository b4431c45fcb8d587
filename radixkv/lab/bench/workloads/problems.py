"""Questions whose answers can be checked."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from radixkv.lab.bench.session import BenchRequest, Reply


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


TEACHER_PROMPT = (
    "You are a patient teacher of mathematics. Answer every question in short steps, one line a step, and end with "
    "a line that has the result alone. These answers were given to other pupils:\n\n"
)
"""Beginning of a system prompt, followed by worked examples."""


def worked_examples(problems: Iterable[Problem]) -> str:
    """Returns worked examples: each question with its answer and a blank line."""
    return "".join(f"{question_prompt(problem)} {problem.answer}\n\n" for problem in problems)


def question_prompt(problem: Problem) -> str:
    """Returns the question without its answer, as the end of a prompt."""
    return f"Question: {problem.question}\nAnswer:"


Check = Callable[[Reply], bool]
"""A ``BenchRequest.check`` that judges every reply."""


def question_request(
    head: str, problem: Problem, output_len: int, check: Callable[[Problem], Check | None]
) -> BenchRequest:
    """Returns a request that asks the question behind the beginning of a prompt."""
    return BenchRequest(head + question_prompt(problem), output_len, check=check(problem))


_BEFORE, _BEHIND = r"(?<![\w-])(?<!\d[.:])", r"(?!\w)(?![.:]\d)"
"""Patterns for where a word or number may begin and where it may end."""
_NUMBER = re.compile(rf"{_BEFORE}-?\$?(?:\d+(?:\.\d+)?|\.\d+){_BEHIND}")


def result_check(problem: Problem, prefix: str = "") -> Check | None:
    """Returns a check that the first choice gives the problem's result.

    Numbers are compared as numbers, words regardless of case.

    Args:
        problem: the problem. If it has no result, None is returned.
        prefix: the beginning of the answer, which the prompt has.
    """
    expected = _result(problem.answer)
    return None if expected is None else lambda reply: _result(prefix + reply.texts[0]) == expected


def majority_result_check(problem: Problem) -> Check | None:
    """Returns a check that the most frequent result of the choices is the problem's.

    Choices without a result do not count; in a tie the result that appears first wins. None: the problem has no
    result.
    """
    expected = _result(problem.answer)

    def check(reply: Reply) -> bool:
        votes = Counter(result for result in map(_result, reply.texts) if result is not None)
        return bool(votes) and votes.most_common(1)[0][0] == expected

    return None if expected is None else check


def prefix_check(answer: str) -> Check:
    """Returns a check that the first choice begins with this answer.

    More text may follow, since requests ignore the end of sequence.
    """
    return lambda reply: reply.texts[0].strip().startswith(answer)


def mention_check(problem: Problem) -> Check | None:
    """Returns a check like ``result_check`` that also accepts answers without the mark of a result.

    Without the mark, the first line of the first choice must contain the result. This is for prompts without worked
    examples, which would teach the mark to the model.
    """
    expected, check = _result(problem.answer), result_check(problem)
    if expected is None or check is None:
        return None

    def check_mention(reply: Reply) -> bool:
        text = reply.texts[0]
        return check(reply) if MARK in text else mentions(answer_line(text), expected)

    return check_mention


def answer_line(text: str, expected: str | None = None) -> str:
    """Returns the part of an output that is the answer: ``expected`` if the output begins so, or the first line.

    The model generates more text after its answer, since requests ignore the end of sequence.
    """
    line = text.strip().partition("\n")[0]
    return expected if expected is not None and line.startswith(expected) else line


def _result(text: str) -> float | str | None:
    result = result_of(text)
    return None if result is None else _value(result)


def mentions(text: str, value: float | str) -> bool:
    """Returns whether the text contains a number or a word, not as a part of another."""
    text = without_grouping(text)
    if isinstance(value, str):
        return re.search(f"{_BEFORE}{re.escape(value.casefold())}{_BEHIND}", text.casefold()) is not None
    return any(_value(number.replace("$", "")) == value for number in _NUMBER.findall(text))


def _value(result: str) -> float | str:
    try:
        number = float(result)
    except ValueError:
        return result.casefold()
    return number if math.isfinite(number) else result.casefold()
