"""The GPU's clock and power while something runs, as ``nvidia-smi`` tells them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "250")


@contextmanager
def watched_power(is_wanted: bool) -> Iterator[dict[str, float]]:
    """Yields a dictionary that has ``clock_mhz`` and ``power_w``, the medians of four samples a second, once the
    block has ended; empty if it is not wanted, or was too short for a sample."""
    found: dict[str, float] = {}
    if not is_wanted:
        yield found
        return
    with tempfile.TemporaryFile("w+") as log:
        watcher = subprocess.Popen(QUERY, stdout=log)
        try:
            yield found
        finally:
            watcher.terminate()
            watcher.wait()
        log.seek(0)
        samples = [line.split(",") for line in log.read().splitlines() if line.count(",") == 1]
    if samples:
        found["clock_mhz"] = median(float(clock) for clock, _ in samples)
        found["power_w"] = round(median(float(power) for _, power in samples), 1)
