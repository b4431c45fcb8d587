"""Common parameters of workloads."""

from __future__ import annotations

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.sampling import MAX_CHOICES

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
