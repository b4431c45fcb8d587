"""``radixkv``'s command line, which at SIGUSR1 writes a report of its tasks and threads.

A script replaces its runtime. Arguments: the report's path, the runtime's script, then those of ``radixkv``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from radixkv import cli
from radixkv.frontend import process
from radixkv.frontend.replicas import start
from radixkv.frontend.runtime_process import RuntimeProcess


class ScriptedRuntimeProcess(RuntimeProcess):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        return await super().start(*args, **kwargs, command=[sys.executable, sys.argv[1]])


def write_report(path: Path) -> None:
    """Writes the names of tasks and threads, without the event loop's pool, which grows with what runs at once."""
    tasks = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())
    threads = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("uvloop_"))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"tasks": tasks, "threads": threads}))
    os.replace(partial, path)


if __name__ == "__main__":
    report = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, lambda *_: write_report(report))
    start.RuntimeProcess = ScriptedRuntimeProcess
    process.SLOW_READER_TIMEOUT_MS = 3_600_000  # a busy machine may delay a reader for long
    script = sys.argv[1]
    sys.exit(cli.main(sys.argv[2:]))
