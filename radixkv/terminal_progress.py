"""Progress of a command on standard error."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TextIO

START_DELAY_S = 0.5
"""Work that ends within this time shows no progress."""
REFRESH_S = 0.2
"""Time between two updates of the live line on a terminal."""
LINE_PERIOD_S = 10.0
"""Time between two lines where the stream is not a terminal."""


class Progress:
    """Shows what a command does and that it goes on; a context manager.

    On a terminal this is one live line, which is erased at the end. Elsewhere it is a line, repeated every
    ``LINE_PERIOD_S``. Work that ends within ``START_DELAY_S`` shows nothing. A thread writes, so that work that
    reports nothing meanwhile is also shown to go on.

    Args:
        activity: what the command does, such as ``loading the model tiny``.
        enabled: False: never writes.
        is_log: writes lines also on a terminal, the first one at once, because other processes write there too.
        stream: None: standard error, if there is one.
    """

    def __init__(
        self, activity: str, *, enabled: bool = True, is_log: bool = False, stream: TextIO | None = None
    ) -> None:
        self._activity = activity
        self._stream = sys.stderr if stream is None else stream
        # Python has no standard error if the command was started with the descriptor closed.
        self._enabled = enabled and self._stream is not None
        self._is_log = is_log
        self._is_live = self._enabled and not is_log and self._stream.isatty()
        self._started_at = time.monotonic()
        self._details = ""
        self._n_tokens: int | None = None
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write_until_end, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._enabled:
            self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._enabled:
            self._writer.join()

    def show(self, details: str, n_tokens: int | None = None) -> None:
        """Sets what the line says behind the activity, and the new tokens from which it computes a rate. Cheap."""
        self._details = details
        self._n_tokens = n_tokens

    def _write_until_end(self) -> None:
        # The stream may be closed or a broken pipe: then the work goes on without progress.
        with contextlib.suppress(OSError, ValueError):
            if self._is_log:
                self._write(f"radixkv: {self._activity}\n")
            elif self._ended.wait(START_DELAY_S):
                return
            else:
                self._write(self._line())
            while not self._ended.wait(REFRESH_S if self._is_live else LINE_PERIOD_S):
                self._write(self._line())
            if self._is_live:
                self._write("\r\x1b[K")

    def _line(self) -> str:
        seconds = time.monotonic() - self._started_at
        parts = [f"{self._activity}: {self._details}" if self._details else self._activity]
        if self._n_tokens is not None:
            parts.append(f"{self._n_tokens / seconds:.0f} tokens/s")
        line = f"{', '.join(parts)}, {seconds:.0f} s"
        if self._is_live:  # a wrapped line could not be erased
            return f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"
        return f"radixkv: {line}\n"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextlib.contextmanager
def shown_download(model: str, show: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Yields ``show``, or without it a function that shows its texts in a line on standard error."""
    with Progress(f"getting the model {model}", enabled=show is None) as progress:
        yield show or progress.show
