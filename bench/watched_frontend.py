"""``radixkv serve`` with a null runtime and a measurement of the event loop's delays.

argv: the file for reports at SIGUSR1, the arguments of the null runtime in one word, the flags of ``radixkv serve``
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from radixkv import cli
from radixkv.frontend.replicas import start
from radixkv.frontend.runtime_process import RuntimeProcess

NULL_RUNTIME = Path(__file__).with_name("null_runtime.py")
TICK_S = 0.01


class _NullRuntimeProcess(RuntimeProcess):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        LoopWatch(Path(sys.argv[1])).install()
        return await super().start(
            *args, **kwargs, command=[sys.executable, str(NULL_RUNTIME), *sys.argv[2].split()]
        )


class LoopWatch:
    """A timer that records how late the event loop calls it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._longest_s = 0.0

    def install(self) -> None:
        """Starts the timer. Each report resets the longest delay."""
        self._loop.add_signal_handler(signal.SIGUSR1, self._report)
        self._wait()

    def _wait(self) -> None:
        self._loop.call_later(TICK_S, self._tick, self._loop.time() + TICK_S)

    def _tick(self, due: float) -> None:
        self._longest_s = max(self._longest_s, self._loop.time() - due)
        self._wait()

    def _report(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(str(self._longest_s))
        os.replace(partial, self._path)
        self._longest_s = 0.0


if __name__ == "__main__":
    with patch.object(start, "RuntimeProcess", _NullRuntimeProcess):
        sys.exit(cli.main(["serve", *sys.argv[3:]]))
