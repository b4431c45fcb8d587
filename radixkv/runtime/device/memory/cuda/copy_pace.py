"""Bounds how fast pages are copied while the GPU computes a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_BYTES_PER_S_BESIDE_STEPS = 20e9
"""Rate of all copies together beside steps, which take at most 5% longer then: a copy takes 0.9 to 2.4 ms of
their time for each GB (docs/decisions/log/0023-page-copies.md)."""
BURST_S = 0.005
"""Time at that rate that copies may catch up after a pause: a thread that has slept may wait as long for the
interpreter's lock."""


class CopyPace:
    """Delays copies beside steps; the copies of both directions share the rate. Safe in several threads.

    Args:
        is_stepping: whether the GPU computes a step now.
        clock: seconds, monotonic.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        is_stepping: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_stepping = is_stepping
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next_at = 0.0
        """Time of the clock at which the next copy may start; earlier than now by the time to catch up."""

    def wait(self, n_bytes: int) -> None:
        """Waits until ``n_bytes`` may be copied; returns at once if the GPU computes no step."""
        if not self._is_stepping():
            return
        with self._lock:
            now = self._clock()
            start = max(now - BURST_S, self._next_at)
            self._next_at = start + n_bytes / MAX_BYTES_PER_S_BESIDE_STEPS
        if start > now:
            self._sleep(start - now)
