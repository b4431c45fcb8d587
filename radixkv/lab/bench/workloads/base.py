"""What all workloads have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.lab.bench.session import Session
from radixkv.wire.sampling import MAX_CHOICES

MAX_COUNT = 1_000_000
"""Upper bound of a count; a workload's texts are all generated before the first is sent."""

RANGES = {
    "num_shots": (0, MAX_COUNT),
    "num_samples": (1, MAX_CHOICES),
    "start": (0, MAX_COUNT),
    "first_token": (0, MAX_COUNT),
}
"""Ranges of the counts that do not have the range 1 to ``MAX_COUNT``."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """The parameters of every workload.

    Raises:
        ConfigError: a count is out of its range.
    """

    repeats_chunks: ClassVar[bool] = False
    """Whether prompts repeat texts behind different ones, so that the report counts what no prefix cache finds."""

    max_concurrency: int = 8
    """Maximum number of requests in flight in a closed loop; it does not limit an open loop, such as a trace's."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            minimum, maximum = RANGES.get(name, (1, MAX_COUNT))
            if isinstance(value, int) and not minimum <= value <= maximum:
                raise ConfigError(f"{name} {shortened(value)} must be between {minimum} and {maximum}")


class FixedOutputParameters(Parameters, frozen=True, kw_only=True):
    """The parameters of a workload whose answers all have the same length."""

    output_len: int = 48
    """Tokens of each answer; the end-of-sequence token is ignored."""


class ChatParameters(FixedOutputParameters, frozen=True, kw_only=True):
    """The parameters of a workload whose later prompts have the answers to earlier ones."""

    history: Literal["model", "recorded"] = "model"
    """Whose answers later prompts have. With recorded ones every server gets the same prompts."""


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


TEMPERATURE = 0.7
"""Temperature of workloads that need different answers to one prompt."""


def sampling_seed(rng: Random) -> int:
    """Returns a seed for a request, of 31 bits, which every server accepts."""
    return rng.getrandbits(31)


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
