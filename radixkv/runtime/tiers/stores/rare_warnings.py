"""Warnings that would otherwise fill the log."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)


class RareWarnings:
    """Warnings of one kind, from any thread; each says how many were left out since the last.

    Args:
        pause_s: shortest time between two of them.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._next = 0.0
        self._n_left_out = 0

    def add(self, text: str, error: Exception) -> None:
        """Logs a warning with its reason, unless there was one lately. O(1)."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._n_left_out += 1
                return
            self._next, n_left_out, self._n_left_out = now + self._pause_s, self._n_left_out, 0
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        more = f" ({n_left_out} more since the last warning)" if n_left_out else ""
        logger.warning("%s: %s%s", text, reason, more)
