"""How problems are laid out in a prompt. The embedded model was trained on texts of this very form."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.bench.workloads.problems.problem import Problem

TEACHER = (
    "You are a patient teacher of mathematics. Answer every question in short steps, one line a step, and end with "
    "a line that has the result alone. These answers were given to other pupils:\n\n"
)
"""Opens a system prompt of worked examples."""


def worked(problems: Iterable[Problem]) -> str:
    """Worked examples: each question with its answer and a blank line."""
    return "".join(f"{asked(problem)} {problem.answer}\n\n" for problem in problems)


def asked(problem: Problem) -> str:
    """The question alone, open for the answer."""
    return f"Question: {problem.question}\nAnswer:"
