"""What a kind makes its sessions from, and what it hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from radixkv.bench.session import Session


@dataclass(frozen=True)
class Source:
    """Where a workload's texts come from: made from the seed, or read from a data set."""

    seed: int = 0
    """Of made texts, of the sampling and of every order that is shuffled."""
    dataset: Path | None = None
    """In a format that the kind reads; None: the texts are made."""
    skip_bad_lines: bool = False
    """Whether lines that cannot be read are counted instead of refused."""


@dataclass(frozen=True)
class Made:
    """The sessions of a workload."""

    sessions: list[Session]
    counts: Mapping[str, int] = field(default_factory=dict)
    """What was left out or changed, by reason, such as ``{"bad_lines": 2, "too_long": 31}``."""
