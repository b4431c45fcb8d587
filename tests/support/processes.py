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
            if _state_and_parent(folder)[1] == pid and argument.encode() in _command(folder).split(b"\0"):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _command(folder: Path) -> bytes:
    """Returns the command line of a process; that of one which is just being started comes a moment later."""
    while not (command := (folder / "cmdline").read_bytes()) and _state_and_parent(folder)[0] != "Z":
        time.sleep(0.001)
    return command


def _state_and_parent(folder: Path) -> tuple[str, int]:
    state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


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
