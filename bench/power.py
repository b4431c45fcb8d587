"""Sampling of the GPU's clock and power with ``nvidia-smi``."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "250")


@contextmanager
def watched_power(is_enabled: bool) -> Iterator[dict[str, float]]:
    """Yields a dictionary that gets ``clock_mhz`` and ``power_w`` when the block ends.

    They are medians of four samples per second. The dictionary stays empty if ``is_enabled`` is false, or the block
    was too short for a sample.
    """
    medians: dict[str, float] = {}
    if not is_enabled:
        yield medians
        return
    with tempfile.TemporaryFile("w+") as log:
        sampler = subprocess.Popen(QUERY, stdout=log)
        try:
            yield medians
        finally:
            sampler.terminate()
            sampler.wait()
        log.seek(0)
        samples = [line.split(",") for line in log.read().splitlines() if line.count(",") == 1]
    if samples:
        medians["clock_mhz"] = median(float(clock) for clock, _ in samples)
        medians["power_w"] = round(median(float(power) for _, power in samples), 1)
