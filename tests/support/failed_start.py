"""A server that does not start, and what may not be left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.live import COMMAND_LINE, LIMIT_S, children, is_running


def reason_to_end(folder: Path, *flags: str, entry: Sequence[str] = COMMAND_LINE) -> str:
    """The one line that ``radixkv serve`` ends with; it says its stages before.

    Afterwards none of its processes is there, and no socket, lock or folder.

    Args:
        folder: for what it keeps while it runs; empty.
        flags: of ``radixkv serve``.
        entry: runs the command line.
    """
    processes: set[int] = set()
    with subprocess.Popen(
        [*entry, "serve", *flags, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    ) as process:
        for _ in range(int(LIMIT_S / 0.01)):
            processes |= set(children(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.01)
                break
        else:
            process.kill()
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, stderr
    assert stdout == ""
    assert [pid for pid in processes if is_running(pid)] == []
    assert [str(path) for path in folder.rglob("*")] == []
    *stages, last = stderr.splitlines()
    assert all(line.startswith("radixkv: ") for line in stages), stderr
    assert last.startswith("radixkv serve: error: "), stderr
    return last
