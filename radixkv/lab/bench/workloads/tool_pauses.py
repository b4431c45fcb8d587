"""Workload of agents whose tools take their time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, log
from zlib import crc32

from radixkv.lab.bench.session import ToolCall
from radixkv.lab.bench.workloads.agents import Agents

_SPREAD = 8.0
"""Medians of tools are between the median of all divided by this and multiplied by it."""
_SIGMA = 0.6
"""Of the logarithm of a log-normal time."""
_ALPHA = 1.5
"""Exponent of a Pareto time: its mean is three times its shortest one, and its variance is infinite."""


class ToolPauses(Agents, frozen=True, kw_only=True, tag="tool-pauses"):
    """Agents as in ``agents``, whose tools take time, and some of whose results never come.

    Each tool has a median of its own, which its name decides. Half of the tools have log-normal times, those of the
    others have a heavy tail. Recorded agents have no such pauses.
    """

    num_sessions: int = 24
    num_shots: int = 4
    tool_median_s: float = 1.0
    """Median time of all tools, in seconds."""
    lost_share: float = 0.1
    """Share of the calls whose results never come: the session ends with them."""

    def tool_seconds(self, calls: Sequence[ToolCall], rng: random.Random) -> float | None:
        """Returns the time of the slowest call; None if the results never come."""
        if rng.random() < self.lost_share:
            return None
        return max(tool_seconds(call.name, self.tool_median_s, rng) for call in calls)


def tool_seconds(tool: str, median_s: float, rng: random.Random) -> float:
    """Returns a random time of a tool, whose name decides how its times are distributed.

    Args:
        tool: its name.
        median_s: median time of all tools.
        rng: draws the time.
    """
    number = crc32(tool.encode())
    of_tool_s = median_s * exp(log(_SPREAD) * (2 * (number >> 1) / 0x7FFFFFFF - 1))
    if number % 2:
        return of_tool_s * rng.lognormvariate(0.0, _SIGMA)
    return of_tool_s / 2 ** (1 / _ALPHA) * rng.paretovariate(_ALPHA)
