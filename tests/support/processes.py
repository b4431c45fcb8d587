"""Child processes, as the kernel lists them."""

from __future__ import annotations

import os
import time
from pathlib import Path

END_LIMIT_S = 20.0


def children(pid: int, argument: str) -> list[int]:
    """Returns the children of a process that have an argument in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def has_ended(pid: int) -> bool:
    """Returns whether a process, child of any other, ends within the time limit."""
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False
