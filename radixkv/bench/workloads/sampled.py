"""How kinds that sample do it."""

from __future__ import annotations

from random import Random

TEMPERATURE = 0.7
"""Of kinds that need different answers to one prompt."""


def sampling_seed(rng: Random) -> int:
    """A seed for a request, small enough for every server."""
    return rng.getrandbits(31)
