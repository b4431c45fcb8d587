"""Input and output of a workload's ``make``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from radixkv.bench.session import Session


@dataclass(frozen=True)
class Source:
    """The seed or the data set that a workload's texts come from."""

    seed: int = 0
    """Seed of generated texts, of sampling and of shuffling."""
    dataset: Path | None = None
    """A file in the workload's format. None: the texts are generated."""
    skip_bad_lines: bool = False
    """Whether bad lines of the data set are skipped and counted. Otherwise they raise an error."""


@dataclass(frozen=True)
class WorkloadSessions:
    """The sessions of a workload."""

    sessions: list[Session]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of items that were left out or changed, by reason, such as ``{"bad_lines": 2, "too_long": 31}``."""
