"""``python -m radixkv.bench.parent_death PID COMMAND...``: becomes the command, and ends when process PID does.

The kernel then sends SIGTERM; nothing else notices that the starter was killed. Between ``fork`` and ``exec`` of a
process with threads this could not be asked for, hence a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Does not return. PID must be the parent, and the thread that started this one must live as long."""
    starter, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
    if os.getppid() != int(starter):
        sys.exit("the process that this one was started for is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
