"""Prompt format of problems, which the embedded model was trained on."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.bench.workloads.problems.problem import Problem

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
