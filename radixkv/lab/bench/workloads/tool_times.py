"""How long the tools of generated agents take."""

from __future__ import annotations

import random
from math import exp, log
from zlib import crc32

_SPREAD = 8.0
"""Medians of tools are between the median of all divided by this and multiplied by it."""
_SIGMA = 0.6
"""Of the logarithm of a log-normal time."""
_ALPHA = 1.5
"""Exponent of a Pareto time: its mean is three times its shortest one, and its variance is infinite."""


class ToolTimes:
    """Draws how long calls of tools take. Each tool has a median of its own, which its name decides.

    Half of the tools have log-normal times, those of the others have a heavy tail.

    Args:
        median_s: the median of all tools; 0: no tool takes any time.
        rng: draws the times.
    """

    def __init__(self, median_s: float, rng: random.Random) -> None:
        self._median_s = median_s
        self._rng = rng

    def draw(self, tool: str) -> float:
        """Returns how long a call of a tool takes, in seconds. O(1)."""
        if not self._median_s:
            return 0.0
        number = crc32(tool.encode())
        median_s = self._median_s * exp(log(_SPREAD) * (2 * (number >> 1) / 0x7FFFFFFF - 1))
        if number % 2:
            return median_s * self._rng.lognormvariate(0.0, _SIGMA)
        return median_s / 2 ** (1 / _ALPHA) * self._rng.paretovariate(_ALPHA)
