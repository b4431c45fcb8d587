"""Sampling settings of workloads that sample."""

from __future__ import annotations

from random import Random

TEMPERATURE = 0.7
"""Temperature of workloads that need different answers to one prompt."""


def sampling_seed(rng: Random) -> int:
    """Returns a seed for a request, of 31 bits, which every server accepts."""
    return rng.getrandbits(31)
