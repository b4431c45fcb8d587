"""The kinds of workloads: each makes the sessions of a run from a seed, or from a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from radixkv.bench.load import Session
from radixkv.bench.problems import Problem, made_problems, read_problems
from radixkv.errors import ConfigError, shortened

MOST = 1_000_000
"""Of anything that a workload counts: its texts are all made before the first is sent."""

TEACHER = (
    "You are a patient teacher of mathematics. Answer every question in short steps, one line a step, and end with "
    "a line that has the result alone. These answers were given to other pupils:\n\n"
)


class _Counts(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What every kind has. All parameters are counts."""

    num_shots: int
    """Worked examples a prompt."""
    output_len: int = 32
    """Tokens of each answer; the end-of-sequence token is ignored."""
    max_concurrency: int = 8
    """Most requests in flight."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            least = 0 if name == "num_shots" else 1
            if not least <= value <= MOST:
                raise ConfigError(f"{name} {shortened(value)} must be between {least} and {MOST}")


class FewShot(_Counts, frozen=True, kw_only=True, tag="fewshot"):
    """Worked examples that all prompts share, then one new question each."""

    num_prompts: int = 48
    num_shots: int = 8

    def sessions(self, seed: int, dataset: Path | None) -> list[Session]:
        """The requests' texts, in order. O(size).

        Without ``dataset`` the problems are made from ``seed``; with it, they are the file's first, and ``seed``
        changes nothing.

        Raises:
            ConfigError: the data set cannot be read, or is too short.
        """
        problems = _problems(self.num_shots + self.num_prompts, seed, dataset)
        shots = _worked(problems[: self.num_shots])
        return [(shots + _asked(problem),) for problem in problems[self.num_shots :]]


class MultiTurn(_Counts, frozen=True, kw_only=True, tag="multiturn"):
    """Chats: a system prompt with worked examples that all share, then question after question.

    A question waits for the answer to the one before, and its prompt has all of the chat so far.
    """

    num_sessions: int = 16
    num_turns: int = 4
    num_shots: int = 3

    def sessions(self, seed: int, dataset: Path | None) -> list[Session]:
        """The questions of each chat, the first behind the system prompt; otherwise as ``FewShot.sessions``."""
        problems = _problems(self.num_shots + self.num_sessions * self.num_turns, seed, dataset)
        system = TEACHER + _worked(problems[: self.num_shots])
        return [
            (system + _asked(first), *("\n\n" + _asked(problem) for problem in more))
            for first, *more in _groups(problems[self.num_shots :], self.num_turns)
        ]


class Unshared(_Counts, frozen=True, kw_only=True, tag="unshared"):
    """Prompts that share nothing: each has its number, worked examples of its own, and a question.

    What the prefix cache costs where it cannot help.
    """

    num_prompts: int = 32
    num_shots: int = 4

    def sessions(self, seed: int, dataset: Path | None) -> list[Session]:
        """As ``FewShot.sessions``."""
        problems = _problems(self.num_prompts * (self.num_shots + 1), seed, dataset)
        return [
            (f"{number}. {_worked(shots)}{_asked(last)}",)
            for number, (*shots, last) in enumerate(_groups(problems, self.num_shots + 1), 1)
        ]


def _problems(count: int, seed: int, dataset: Path | None) -> list[Problem]:
    problems = made_problems(seed) if dataset is None else read_problems(dataset)
    taken = list(islice(problems, count))
    if len(taken) < count:
        raise ConfigError(
            f"{dataset} has {len(taken)} problems; the workload needs {count}; give a longer file or ask for less"
        )
    return taken


def _groups(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    return (problems[start : start + size] for start in range(0, len(problems), size))


def _worked(problems: Iterable[Problem]) -> str:
    return "".join(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n" for problem in problems)


def _asked(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer:"
