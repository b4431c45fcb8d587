"""Limits that a process sets itself, before it does what somebody else has asked for."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def limit_memory(memory_bytes: int) -> None:
    """Limits the memory that this process may take from now on. Only Linux counts it in this way."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, used + memory_bytes))
