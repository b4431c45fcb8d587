"""Problems of school mathematics, generated or read from a file in GSM8K's format.

Each step of a generated answer is one small operation: a product of a two-digit and a one-digit number at most, a
quotient from the multiplication tables, or a sum or difference below 1,000.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from radixkv.lab.bench.workloads.base import Source, bad_lines, check_enough
from radixkv.lab.bench.workloads.datasets import PROBLEMS, Items, read_lines
from radixkv.lab.bench.workloads.problems import MARK, Problem, worked_examples
from radixkv.lab.bench.workloads.templates import Gaps, draw_values, read_templates

_STEP = re.compile(r"\{(\w+)\} ([*/+-]) (\d|\{\w+\}) = \$?\{(\w+)\}")
"""A step's operation: a value's name, the operator, a digit or another value's gap, and the name of the result."""
_WORDS: Gaps = {"name friend": "names", "goods": "goods", "fruit": "fruits", "spot": "spots", "day": "days"}
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": operator.floordiv,
    "+": operator.add,
    "-": operator.sub,
}


class Template(msgspec.Struct, frozen=True):
    """A problem with gaps in braces.

    Any gap may be the name of a number or of a step's result, or ``name``, ``friend``, ``goods``, ``fruit``,
    ``spot``, ``day`` or ``choice``.
    """

    numbers: Gaps
    """The range of each random number."""
    question: str
    steps: tuple[str, ...]
    """The lines of the answer, each with one operation; the last result is the problem's."""
    choices: tuple[str, ...] = ()
    """Texts for ``choice``."""
    hidden: tuple[str, ...] = ()
    """Steps that only give values to the question."""

    def problem(self, rng: random.Random) -> Problem:
        """Returns a problem with random values in the gaps."""
        values = draw_values(rng, {**_WORDS, **self.numbers, **({"choice": self.choices} if self.choices else {})})
        result = 0
        for step in (*self.hidden, *self.steps):
            match = _STEP.match(step)
            assert match is not None, step
            left, sign, right, gap = match.groups()
            values[gap] = result = _OPERATORS[sign](int(values[left]), int(right.format_map(values)))
        answer = "\n".join([*self.steps, f"{MARK} {result}"])
        return Problem(self.question.format_map(values), answer.format_map(values))


TEMPLATES = read_templates("problems", Template)


def generate_problems(seed: int) -> Iterator[Problem]:
    """Yields endless different problems; equal seeds give equal problems.

    Each round has one problem of every template, in shuffled order, so that neighbours differ.
    """
    rng = random.Random(seed)
    templates = list(TEMPLATES)
    seen: set[str] = set()
    while True:
        rng.shuffle(templates)
        for template in templates:
            problem = template.problem(rng)
            while problem.question in seen:
                problem = template.problem(rng)
            seen.add(problem.question)
            yield problem


def read_problems(path: Path, *, skip_bad_lines: bool = False) -> Items[Problem]:
    """Reads a file with one ``{"question": text, "answer": text}`` in a line; ignores other fields.

    Raises:
        ConfigError: as ``read_lines``.
    """
    decoder = msgspec.json.Decoder(Problem)
    return read_lines(path, decoder.decode, expected=PROBLEMS, skip_bad_lines=skip_bad_lines)


class Problems(NamedTuple):
    """The problems of a workload."""

    shots: str
    """The worked examples before them."""
    items: Sequence[Problem]
    counts: dict[str, int]
    """As ``WorkloadSessions.counts``."""


def problems_from(
    source: Source, n_shots: int, n_problems: int, settings: str = "num_prompts or num_shots"
) -> Problems:
    """Generates word problems from the seed, or takes the first of a data set in GSM8K's format.

    Args:
        source: seed or data set; the seed does not change which problems of a data set are taken.
        n_shots: number of problems with answers, which come first.
        n_problems: number of problems.
        settings: as in ``check_enough``.

    Raises:
        ConfigError: the data set cannot be read or is too short.
    """
    count, counts = n_shots + n_problems, dict[str, int]()
    if source.dataset is None:
        problems = list(islice(generate_problems(source.seed), count))
    else:
        read = read_problems(source.dataset, skip_bad_lines=source.skip_bad_lines)
        check_enough(source, "problems", len(read.items), count, settings=settings)
        problems, counts = read.items[:count], bad_lines(read.n_bad_lines)
    return Problems(worked_examples(problems[:n_shots]), problems[n_shots:], counts)


def groups(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    """Yields the problems in groups of ``size``."""
    return (problems[start : start + size] for start in range(0, len(problems), size))
