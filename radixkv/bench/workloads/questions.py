"""Word problems, generated or read from a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.datasets.gsm8k import read_problems
from radixkv.bench.workloads.problems.arithmetic import generate_problems
from radixkv.bench.workloads.problems.problem import Problem
from radixkv.bench.workloads.source import Source
from radixkv.errors import ConfigError


class Problems(NamedTuple):
    """The problems of a workload."""

    items: Sequence[Problem]
    counts: dict[str, int]
    """As ``WorkloadSessions.counts``."""


def problems_from(source: Source, count: int, *, settings: str) -> Problems:
    """Generates word problems from the seed, or takes the first of a data set in GSM8K's format.

    Args:
        source: seed or data set; the seed does not change which problems of a data set are taken.
        count: number of problems.
        settings: as in ``check_enough``.

    Raises:
        ConfigError: the data set cannot be read or is too short.
    """
    if source.dataset is None:
        return Problems(list(islice(generate_problems(source.seed), count)), {})
    read = read_problems(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "problems", len(read.items), count, settings=settings)
    return Problems(read.items[:count], bad_lines(read.n_bad_lines))


def check_enough(source: Source, items: str, n_available: int, n_needed: int, *, settings: str) -> None:
    """Raises ``ConfigError`` if the data set has fewer items than the workload needs.

    Args:
        source: the data set.
        items: what the items are, for the error's text.
        n_available: number of items in the data set.
        n_needed: number of items that the workload needs.
        settings: the workload's parameters that determine ``n_needed``, for the error's text.
    """
    if n_available < n_needed:
        raise ConfigError(
            f"{source.dataset} has {n_available} {items}; the workload needs {n_needed}; "
            f"give a longer file, or lower {settings}"
        )


def bad_lines(count: int) -> dict[str, int]:
    """Returns the entry of ``WorkloadSessions.counts`` for bad lines that were left out."""
    return {"bad_lines": count} if count else {}


def groups(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    """Yields the problems in groups of ``size``."""
    return (problems[start : start + size] for start in range(0, len(problems), size))
