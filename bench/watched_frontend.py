"""``radixkv serve`` over a null runtime, with a watch on the event loop: what each callback takes.

argv: the file to report to at SIGUSR1, seconds a step of the null runtime, then the flags of ``radixkv serve``
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from radixkv import cli
from radixkv.frontend import server
from radixkv.frontend.supervise import Runtime

NULL_RUNTIME = Path(__file__).with_name("null_runtime.py")
N_SHOWN = 5


class _OverNull(Runtime):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        return await super().start(*args, **kwargs, command=[sys.executable, str(NULL_RUNTIME), sys.argv[1]])


class LoopWatch:
    """Times every callback of the event loop, in wall and processor time of its thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._longest: list[tuple[float, float, str]] = []

    def install(self) -> None:
        """From now on. A report starts the next one from nothing."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            wall, processor = time.perf_counter(), time.thread_time()
            run(handle)
            self._take(time.perf_counter() - wall, time.thread_time() - processor, handle)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, lambda *_: self._report())

    def _take(self, wall_s: float, processor_s: float, handle: asyncio.Handle) -> None:
        if len(self._longest) < N_SHOWN or processor_s > self._longest[-1][0]:
            self._longest.append((processor_s, wall_s, _name(handle)))
            self._longest.sort(reverse=True)
            del self._longest[N_SHOWN:]

    def _report(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._longest))
        os.replace(partial, self._path)
        self._longest = []


def _name(handle: asyncio.Handle) -> str:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    if isinstance(task, asyncio.Task):
        return str(task.get_coro().__qualname__)  # type: ignore[union-attr]
    return str(getattr(handle._callback, "__qualname__", handle._callback))  # type: ignore[attr-defined]


if __name__ == "__main__":
    LoopWatch(Path(sys.argv.pop(1))).install()
    server.Runtime = _OverNull  # type: ignore[misc]
    sys.exit(cli.main(["serve", *sys.argv[2:]]))
