"""``parent_death.py PID COMMAND...``: becomes the command, which gets SIGTERM when its parent process PID dies.

Only the kernel can report that the parent was killed. ``prctl`` cannot be called safely between ``fork`` and
``exec`` in a process with threads, so this script calls it. It imports little, since every child process runs it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the command; does not return.

    PID must be the parent process. The kernel signals when the parent's thread that started this process ends, so
    that thread must live as long as the parent.
    """
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
    if os.getppid() != int(parent_pid):
        sys.exit(f"the parent process {parent_pid} is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
