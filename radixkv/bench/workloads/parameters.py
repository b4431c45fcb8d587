"""The parameters that kinds have in common, and their ranges."""

from __future__ import annotations

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.sampling import MAX_CHOICES

MAX = 1_000_000
"""Of anything that a workload counts: its texts are all made before the first is sent."""

RANGES = {
    "num_shots": (0, MAX),
    "num_samples": (1, MAX_CHOICES),
    "start": (0, MAX),
    "first_token": (0, MAX),
}
"""Of the counts that are not 1 to ``MAX``."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What every kind has.

    Raises:
        ConfigError: a count is out of its range.
    """

    max_concurrency: int = 8
    """Most requests in flight of a closed loop. An open one, such as a trace's, has no limit of its own."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            least, most = RANGES.get(name, (1, MAX))
            if isinstance(value, int) and not least <= value <= most:
                raise ConfigError(f"{name} {shortened(value)} must be between {least} and {most}")


class Answered(Parameters, frozen=True, kw_only=True):
    """The parameters of a kind whose answers all have one length."""

    output_len: int = 48
    """Tokens of each answer; the end-of-sequence token is ignored."""
