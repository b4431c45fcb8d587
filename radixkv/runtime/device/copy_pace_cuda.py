"""Bounds how fast pages are copied while the GPU computes a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, sleep

_MAX_BYTES_PER_S_BESIDE_STEPS = 28e9
"""Rate of all copies together beside steps. A transfer takes 1.0 to 1.4 ms of the steps' time for each GB, so that
steps take at most 5% longer (docs/decisions/log/0023-page-copies.md)."""


class CopyPace:
    """Delays copies beside steps; the copies of both directions share the rate. Safe in several threads.

    Args:
        is_stepping: whether the GPU computes a step now.
    """

    def __init__(self, is_stepping: Callable[[], bool]) -> None:
        self._is_stepping = is_stepping
        self._lock = threading.Lock()
        self._next_at = 0.0
        """Time of ``perf_counter`` at which the next copy may start."""

    def wait(self, n_bytes: int) -> None:
        """Waits until ``n_bytes`` may be copied; returns at once if the GPU computes no step."""
        if not self._is_stepping():
            return
        with self._lock:
            now = perf_counter()
            start = max(now, self._next_at)
            self._next_at = start + n_bytes / _MAX_BYTES_PER_S_BESIDE_STEPS
        if start > now:
            sleep(start - now)
