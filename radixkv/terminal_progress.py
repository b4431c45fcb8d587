"""A progress line on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

START_DELAY_S = 1.0
"""Work that ends within this time shows no progress line."""
REFRESH_S = 0.2
"""Minimum time between two updates of the line."""


class Progress:
    """A terminal line with the current progress; a context manager, which erases the line at the end.

    Writes nothing if the stream is not a terminal, or if the work ends within ``START_DELAY_S``.

    Args:
        unit: what is counted, in the plural.
        total: how many there are.
        enabled: False: never writes.
        stream: None: standard error.
    """

    def __init__(self, unit: str, total: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._unit = unit
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream.isatty()
        self._started_at = time.monotonic()
        self._next_refresh = self._started_at + START_DELAY_S
        self._has_written = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_written:
            self._write("")

    def show(self, n_done: int, n_tokens: int, details: str = "") -> None:
        """Shows what is done so far, and ``details`` behind it. Cheap: most calls write nothing."""
        now = time.monotonic()
        if self._enabled and now >= self._next_refresh:
            self._next_refresh = now + REFRESH_S
            seconds = now - self._started_at
            rate = n_tokens / seconds
            line = (
                f"{n_done}/{self._total} {self._unit}, {n_tokens} new tokens, {seconds:.0f} s, {rate:.0f} tokens/s"
            )
            self._write(f"{line}, {details}" if details else line)

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._has_written = True
