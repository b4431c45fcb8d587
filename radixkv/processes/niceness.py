"""Threads that leave the cores to others."""

from __future__ import annotations

import os
import threading

_NICENESS = 10
_MOST = 19


def be_nicer() -> None:
    """Makes the current thread nicer than its process: others go first where there are too few cores for all."""
    niceness = min(_MOST, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
