"""A wall clock that can be set without the machine's."""

from __future__ import annotations

import os
import time
from pathlib import Path

CLOCK_FILE = "RADIXKV_CHAOS_CLOCK"
"""The environment variable with the path of the file that holds how many seconds the clock is ahead."""
_N_DIGITS = 16


def make_clock_movable() -> None:
    """Adds the number in the file to ``time.time`` and ``time.time_ns`` of this process, also if it changes later.

    ``datetime.now``, which only dates lines and templates use, has the machine's clock.
    """
    descriptor = os.open(os.environ[CLOCK_FILE], os.O_RDONLY)  # kept open: a fault may take all other files
    true_time_ns = time.time_ns

    def time_ns() -> int:
        return true_time_ns() + int(os.pread(descriptor, _N_DIGITS, 0)) * 10**9

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def set_clock(path: Path, ahead_s: int) -> None:
    """Sets how many seconds the clocks are ahead."""
    path.touch()
    with path.open("r+b", buffering=0) as file:
        file.write(f"{ahead_s:{_N_DIGITS}d}".encode())
