"""Problems for prompts: where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.datasets.gsm8k import read_problems
from radixkv.bench.workloads.problems.arithmetic import made_problems
from radixkv.bench.workloads.problems.problem import Problem
from radixkv.bench.workloads.source import Source
from radixkv.errors import ConfigError


class Problems(NamedTuple):
    """As many as were asked for."""

    items: Sequence[Problem]
    counts: dict[str, int]
    """As ``Made.counts``."""


def problems_of(source: Source, count: int, *, settings: str) -> Problems:
    """Word problems: made from the seed, or the first of a file in GSM8K's format, whatever the seed.

    Args:
        settings: as in ``check_enough``.

    Raises:
        ConfigError: the data set cannot be read, or is too short.
    """
    if source.dataset is None:
        return Problems(list(islice(made_problems(source.seed), count)), {})
    read = read_problems(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "problems", len(read.items), count, settings=settings)
    return Problems(read.items[:count], bad_lines(read.n_bad_lines))


def check_enough(source: Source, what: str, n_there: int, n_needed: int, *, settings: str) -> None:
    """Raises ``ConfigError`` if the data set has fewer than the workload needs.

    Args:
        settings: which of the workload's decide how many it needs.
    """
    if n_there < n_needed:
        raise ConfigError(
            f"{source.dataset} has {n_there} {what}; the workload needs {n_needed}; "
            f"give a longer file, or lower {settings}"
        )


def bad_lines(count: int) -> dict[str, int]:
    """Lines that were left out, for ``Made.counts``."""
    return {"bad_lines": count} if count else {}


def groups(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    """The problems, ``size`` at a time."""
    return (problems[start : start + size] for start in range(0, len(problems), size))
