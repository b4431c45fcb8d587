"""Held-out problems: prompts of each family at a length, and what answers them right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.problems.arithmetic import made_problems
from radixkv.bench.workloads.problems.chat import made_chats
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.problems.lookup import about, made_documents
from radixkv.bench.workloads.problems.problem import Problem, result_of
from radixkv.bench.workloads.problems.tools import errand_messages, made_errands
from training.texts import (
    CHAT_TOKENS,
    ERRAND_TOKENS,
    FACT_TOKENS,
    PROBLEM_TOKENS,
    Message,
    chat_messages,
    question_messages,
)

SEED = 7
"""Of the problems; the examples and the documents of chats have seeds just above."""
SCORE_SEEDS = range(17)
"""Whose questions training leaves out: those of the cases, and the first that workloads are made from."""
LENGTHS = (500, 1000, 2000, 4000, 7500)
"""Of the prompts, in tokens; with the answer, the last stays below the model's 8192."""
OUTPUT_TOKENS = 64
"""No right answer is longer."""


class Case(NamedTuple):
    """A prompt, and whether a text answers it right."""

    prompt: str | list[Message]
    """A text, or the messages of a chat."""
    is_right: Callable[[str], bool]


def cases(family: str, n_tokens: int) -> Iterator[Case]:
    """Endless cases with prompts of about ``n_tokens``."""
    return _FAMILIES[family](n_tokens)


def families() -> tuple[str, ...]:
    """The names of all."""
    return tuple(_FAMILIES)


def _arithmetic(n_tokens: int) -> Iterator[Case]:
    """A question behind worked examples, which are the same for all."""
    shots = worked(islice(made_problems(SEED + 1), max(0, n_tokens // PROBLEM_TOKENS - 1)))
    for problem in made_problems(SEED):
        yield Case(shots + asked(problem), _has_result(problem))


def _lookup(n_tokens: int) -> Iterator[Case]:
    """A document, and one question about it."""
    for document in made_documents(SEED, max(1, int((n_tokens - 40) / FACT_TOKENS)), 1):
        (problem,) = document.problems
        yield Case(about(document) + asked(problem), _has_result(problem))


def _in_chat(n_tokens: int) -> Iterator[Case]:
    """A document as the system prompt of a chat, and one question."""
    for document in made_documents(SEED + 2, max(1, int((n_tokens - 60) / FACT_TOKENS)), 1):
        *said, _ = question_messages("Be brief and kind.\n\n" + document.text, document.problems)
        yield Case(said, _has_result(document.problems[0]))


def _chat(n_tokens: int) -> Iterator[Case]:
    """The last answer of a chat."""
    for chat in made_chats(SEED, max(2, n_tokens // CHAT_TOKENS)):
        *said, answer = chat_messages(chat)
        yield Case(said, answer["content"].__eq__)


def _tools(n_tokens: int) -> Iterator[Case]:
    """In turns, the call that a request needs, and what to say when its result has come."""
    for errand in made_errands(SEED, max(1, (n_tokens - 60) // ERRAND_TOKENS)):
        messages = errand_messages(errand)
        turn = errand.turns[-1]
        yield Case(messages[:-3], _is_json(turn.call))
        yield Case(messages[:-1], turn.answer.__eq__)


def _has_result(problem: Problem) -> Callable[[str], bool]:
    right = result_of(problem.answer)
    return lambda text: result_of(text) == right


def _is_json(right: str) -> Callable[[str], bool]:
    def is_right(text: str) -> bool:
        try:
            return bool(json.loads(text) == json.loads(right))
        except ValueError:
            return False

    return is_right


_FAMILIES: dict[str, Callable[[int], Iterator[Case]]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "in_chat": _in_chat,
    "chat": _chat,
    "tools": _tools,
}
