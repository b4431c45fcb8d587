"""How long the stages of a start take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class StartTimes:
    """Seconds of the stages of a start, each of which begins where the one before ended.

    Args:
        begun: when the first stage began, on ``clock``; None: now.
        clock: seconds, monotonic.
    """

    def __init__(self, begun: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock() if begun is None else begun
        self.seconds: dict[str, float] = {}
        """Seconds of each ended stage, in order."""

    @classmethod
    def of_process(cls) -> StartTimes:
        """Returns times whose first stage began with this process."""
        return cls(time.monotonic() - process_age_s())

    def end(self, stage: str) -> None:
        """Ends a stage. A stage that ends again has the sum of its times."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """Returns the sum, and the stages from the longest on."""
        stages = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages)
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def process_age_s() -> float:
    """Returns the seconds since this process began."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
