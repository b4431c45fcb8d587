"""Held-out evaluation cases: prompts of each family at a given length, with a check of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.agents import generate_tool_tasks, tool_task_messages
from radixkv.bench.workloads.arithmetic import generate_problems
from radixkv.bench.workloads.chat import generate_chats
from radixkv.bench.workloads.documents import document_head, generate_documents
from radixkv.bench.workloads.problems import Problem, question_prompt, result_of, worked_examples
from training.texts import (
    CHAT_TOKENS,
    FACT_TOKENS,
    PROBLEM_TOKENS,
    TOOL_TASK_TOKENS,
    Message,
    chat_messages,
    question_messages,
)

SEED = 7
"""Seed of the problems; examples and the documents of chats use the seeds just above it."""
SCORE_SEEDS = range(17)
"""Seeds whose questions training leaves out: those of the cases and the first ones of the workloads."""
LENGTHS = (500, 1000, 2000, 4000, 7500)
"""Approximate prompt lengths in tokens; the last one and its answer stay below the model's 8192."""
OUTPUT_TOKENS = 64
"""Maximum length of a right answer in tokens."""


class Case(NamedTuple):
    """A prompt with a check of its answer."""

    prompt: str | list[Message]
    """A text, or the messages of a chat."""
    is_right: Callable[[str], bool]
    """Returns whether a text is the right answer."""


def cases(family: str, n_tokens: int) -> Iterator[Case]:
    """Yields endless cases with prompts of about ``n_tokens``."""
    return _FAMILIES[family](n_tokens)


def families() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(_FAMILIES)


def _arithmetic(n_tokens: int) -> Iterator[Case]:
    """Yields questions after worked examples, which are the same for all cases."""
    shots = worked_examples(islice(generate_problems(SEED + 1), max(0, n_tokens // PROBLEM_TOKENS - 1)))
    for problem in generate_problems(SEED):
        yield Case(shots + question_prompt(problem), _has_result(problem))


def _lookup(n_tokens: int) -> Iterator[Case]:
    """Yields a document and one question about it."""
    for document in generate_documents(SEED, max(1, int((n_tokens - 40) / FACT_TOKENS)), 1):
        (problem,) = document.problems
        yield Case(document_head(document) + question_prompt(problem), _has_result(problem))


def _in_chat(n_tokens: int) -> Iterator[Case]:
    """Yields chats with a document in the system prompt and one question."""
    for document in generate_documents(SEED + 2, max(1, int((n_tokens - 60) / FACT_TOKENS)), 1):
        *messages, _ = question_messages("Be brief and kind.\n\n" + document.text, document.problems)
        yield Case(messages, _has_result(document.problems[0]))


def _chat(n_tokens: int) -> Iterator[Case]:
    """Yields chats whose last answer is the right one."""
    for chat in generate_chats(SEED, max(2, n_tokens // CHAT_TOKENS)):
        *messages, answer = chat_messages(chat)
        yield Case(messages, answer["content"].__eq__)


def _tools(n_tokens: int) -> Iterator[Case]:
    """Yields alternately a prompt for a tool call and a prompt for the answer after the tool's result."""
    for tool_task in generate_tool_tasks(SEED, max(1, (n_tokens - 60) // TOOL_TASK_TOKENS)):
        messages = tool_task_messages(tool_task)
        turn = tool_task.turns[-1]
        yield Case(messages[:-3], _is_json(turn.call))
        yield Case(messages[:-1], turn.answer.__eq__)


def _has_result(problem: Problem) -> Callable[[str], bool]:
    expected = result_of(problem.answer)
    return lambda text: result_of(text) == expected


def _is_json(expected: str) -> Callable[[str], bool]:
    def is_right(text: str) -> bool:
        try:
            return bool(json.loads(text) == json.loads(expected))
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
