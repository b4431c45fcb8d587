"""Held-out evaluation cases: prompts of each family at a given length, with checks of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.lab.bench.workloads.documents import document_head, generate_documents
from radixkv.lab.bench.workloads.errands import generate_agent_tasks
from radixkv.lab.bench.workloads.problems import (
    TEACHER_PROMPT,
    Problem,
    question_prompt,
    result_of,
    worked_examples,
)
from training.answers import Check, answers_like, is_json
from training.chat_format import Conversation
from training.conversations import agent_conversation, chat_messages, question_messages, with_reasoning
from training.extraction import generate_extractions
from training.llama import ModelShape
from training.made_tools import generate_made_tasks
from training.texts import (
    CHAT_TOKENS,
    ERRAND_TOKENS,
    FACT_TOKENS,
    PROBLEM_TOKENS,
    TOOLS_TOKENS,
)

SEED = 7
"""Seed of the problems; examples and the documents of chats use the seeds just above it."""
SCORE_SEEDS = range(17)
"""Seeds whose questions training leaves out: those of the cases and the first ones of the workloads."""
LENGTHS = (500, 1000, 2000, 4000, 7500)
"""Approximate prompt lengths in tokens."""
OUTPUT_TOKENS = 256
"""Maximum length of a right answer in tokens."""


class Step(NamedTuple):
    """A prompt with a check of its answer."""

    prompt: str | Conversation
    """A text, or a chat whose next message is to be written."""
    is_right: Check


class Case(NamedTuple):
    """One or more prompts; the case is right if all answers are.

    The steps of an agent's loop contain the right answers to the earlier steps, so all are right if and only if the
    loop is right in which the model's own answers are sent back.
    """

    steps: tuple[Step, ...]


def fitting_cases(
    family: str, n_tokens: int, count: int, encode: Callable[[str | Conversation], Sequence[int]]
) -> list[Case]:
    """Returns the first cases with prompts of about ``n_tokens`` that leave room for an answer in the context.

    Args:
        family: one of ``families()``.
        n_tokens: approximate length of the prompts.
        count: number of cases.
        encode: returns the token ids of a prompt.
    """
    longest = ModelShape.context_length - OUTPUT_TOKENS

    def fits(case: Case) -> bool:
        return all(len(encode(step.prompt)) <= longest for step in case.steps)

    return list(islice(filter(fits, cases(family, n_tokens)), count))


def count_right(batch: Sequence[Case], answers: Iterable[str]) -> int:
    """Returns the number of cases all of whose answers are right.

    Args:
        batch: the cases.
        answers: the answers to all their steps, in order.
    """
    rest = iter(answers)
    checked = [[step.is_right(next(rest)) for step in case.steps] for case in batch]
    return sum(map(all, checked))


def cases(family: str, n_tokens: int) -> Iterator[Case]:
    """Yields endless cases with prompts of about ``n_tokens``."""
    return _FAMILIES[family](n_tokens)


def families() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(_FAMILIES)


def lengths(family: str) -> tuple[int, ...]:
    """Returns those of ``LENGTHS`` that a family has prompts of."""
    return LENGTHS[:1] if family == "extraction" else LENGTHS


def _arithmetic(n_tokens: int) -> Iterator[Case]:
    """Yields questions after worked examples, which are the same for all cases."""
    shots = worked_examples(islice(generate_problems(SEED + 1), max(0, n_tokens // PROBLEM_TOKENS - 1)))
    for problem in generate_problems(SEED):
        yield Case((Step(shots + question_prompt(problem), _has_result(problem)),))


def _lookup(n_tokens: int) -> Iterator[Case]:
    """Yields a document and one question about it."""
    for document in generate_documents(SEED, max(1, int((n_tokens - 40) / FACT_TOKENS)), 1):
        (problem,) = document.problems
        yield Case((Step(document_head(document) + question_prompt(problem), _has_result(problem)),))


def _in_chat(n_tokens: int) -> Iterator[Case]:
    """Yields chats with a document in the system prompt and one question."""
    for document in generate_documents(SEED + 2, max(1, int((n_tokens - 60) / FACT_TOKENS)), 1):
        *messages, _ = question_messages("Be brief and kind.\n\n" + document.text, document.problems)
        yield Case((Step(Conversation(messages), _has_result(document.problems[0])),))


def _chat(n_tokens: int) -> Iterator[Case]:
    """Yields chats whose last answer is the right one."""
    for chat in generate_chats(SEED, max(2, n_tokens // CHAT_TOKENS)):
        *messages, answer = chat_messages(chat)
        yield Case((Step(Conversation(messages), answer["content"].__eq__),))


def _agents(n_tokens: int) -> Iterator[Case]:
    """Yields the last errand of agents with three tools."""
    for task in generate_agent_tasks(SEED, _n_errands(n_tokens)):
        yield _last_request(agent_conversation(task))


def _made_tools(n_tokens: int) -> Iterator[Case]:
    """Yields the last request to assistants with tools that no one has seen before."""
    for conversation in generate_made_tasks(SEED, _n_errands(n_tokens)):
        yield _last_request(conversation)


def _extraction(n_tokens: int) -> Iterator[Case]:
    """Yields texts of one record with schemas, to be answered with JSON; the prompts have some 200 tokens."""
    for conversation in generate_extractions(SEED, 1):
        *messages, answer = conversation.messages
        yield Case((Step(conversation._replace(messages=messages), is_json(answer["content"])),))


def _reasoning(n_tokens: int) -> Iterator[Case]:
    """Yields in turn a problem of arithmetic, a question about a document and an errand, to be thought about."""
    n_shots = max(0, n_tokens // PROBLEM_TOKENS - 1)
    system = TEACHER_PROMPT + worked_examples(islice(generate_problems(SEED + 1), n_shots))
    documents = generate_documents(SEED + 3, max(1, int((n_tokens - 60) / FACT_TOKENS)), 1)
    tasks = generate_agent_tasks(SEED + 3, _n_errands(n_tokens))
    for problem, document, task in zip(generate_problems(SEED + 3), documents, tasks, strict=False):
        yield _last_request(Conversation(question_messages(system, [problem], thinks=True), enable_thinking=True))
        about = question_messages(document.text, document.problems, thinks=True)
        yield _last_request(Conversation(about, enable_thinking=True))
        yield _last_request(with_reasoning(agent_conversation(task)))


def _n_errands(n_tokens: int) -> int:
    return max(1, (n_tokens - TOOLS_TOKENS) // ERRAND_TOKENS)


def _last_request(conversation: Conversation) -> Case:
    """Returns the case whose steps are the assistant's messages after the last one of the user."""
    messages = conversation.messages
    start = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return Case(
        tuple(
            Step(conversation._replace(messages=messages[:index]), answers_like(message))
            for index, message in enumerate(messages)
            if index > start and message["role"] == "assistant"
        )
    )


def _has_result(problem: Problem) -> Check:
    expected = result_of(problem.answer)
    return lambda text: result_of(text) == expected


_FAMILIES: dict[str, Callable[[int], Iterator[Case]]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "in_chat": _in_chat,
    "chat": _chat,
    "agents": _agents,
    "made_tools": _made_tools,
    "extraction": _extraction,
    "reasoning": _reasoning,
}
