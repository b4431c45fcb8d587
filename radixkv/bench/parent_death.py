"""``python -m radixkv.bench.parent_death PID COMMAND...``: runs the command until its parent process PID dies.

The kernel sends SIGTERM when the parent dies; nothing else reports that the parent was killed. ``prctl`` cannot be
called safely between ``fork`` and ``exec`` in a process with threads, so a separate process calls it.
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
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_PDEATHSIG")
    if os.getppid() != int(parent_pid):
        sys.exit(f"the parent process {parent_pid} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
