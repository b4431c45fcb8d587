"""Threads that steps go before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

_NICENESS = 10
"""By how much the threads are nicer than steps, which go first where there are too few cores for both."""


def start_nice_thread(work: Callable[[], None]) -> threading.Thread:
    """Starts and returns a thread that does ``work``. Raises ``RuntimeError`` if the system starts no more."""
    thread = threading.Thread(target=_work_nicely, args=(work,), daemon=True)
    thread.start()
    return thread


def _work_nicely(work: Callable[[], None]) -> None:
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # of this thread alone
    work()
