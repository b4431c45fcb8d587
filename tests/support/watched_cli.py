"""``radixkv``'s command line, seen from inside: at SIGUSR1 it writes what its event loop still does.

Its runtime is another script. Arguments: where to write, the runtime's script, then those of ``radixkv``.
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
from radixkv.frontend.runtime_process import Runtime


class OtherRuntime(Runtime):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        return await super().start(*args, **kwargs, command=[sys.executable, sys.argv[1]])


def write_report(path: Path) -> None:
    """The names of tasks and threads; those of the default executor stay, and are none of anybody's."""
    tasks = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())
    threads = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"tasks": tasks, "threads": threads}))
    os.replace(partial, path)


if __name__ == "__main__":
    report = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, lambda *_: write_report(report))
    process.Runtime = OtherRuntime
    process.SLOW_READER_MS = 3_600_000  # the kernel would cut a reader whom a busy machine lets wait
    script = sys.argv[1]
    sys.exit(cli.main(sys.argv[2:]))
