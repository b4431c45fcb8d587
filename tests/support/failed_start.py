"""A check of a server whose start fails."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.live import COMMAND_LINE, LIMIT_S, children, is_running


def failed_start_error(folder: Path, *flags: str, entry: Sequence[str] = COMMAND_LINE) -> str:
    """Runs ``radixkv serve``, which must fail, and returns its last line, the error.

    Checks that all lines before report progress, and that no process, socket, lock or folder is left.

    Args:
        folder: an empty folder for temporary files.
        flags: flags of ``radixkv serve``. Without ``--grammar-backend`` the server starts sooner, without grammars.
        entry: the command line's entry point.
    """
    grammars = () if "--grammar-backend" in flags else ("--grammar-backend", "none")
    processes: set[int] = set()
    with subprocess.Popen(
        [*entry, "serve", *flags, *grammars, "--port", "0"],
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
