"""How far long work is, for people who watch a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

FIRST_AFTER_S = 1.0
EVERY_S = 0.2


class Progress:
    """One line on a terminal that is written over and over, and is gone in the end. Use it as ``with``.

    Nothing is written where the stream is no terminal, nor for work that ends within a second.

    Args:
        what: is counted, in the plural.
        total: how many there are.
        is_wanted: False: never write.
    """

    def __init__(self, what: str, total: int, *, is_wanted: bool = True, stream: TextIO | None = None) -> None:
        self._what = what
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_wanted and self._stream.isatty()
        self._begun = time.monotonic()
        self._next = self._begun + FIRST_AFTER_S
        self._has_written = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_written:
            self._write("")

    def show(self, n_done: int, n_tokens: int, more: str = "") -> None:
        """So much is done by now, and what else is to be told. Cheap: most calls write nothing."""
        now = time.monotonic()
        if self._is_shown and now >= self._next:
            self._next = now + EVERY_S
            seconds = now - self._begun
            rate = n_tokens / seconds
            line = (
                f"{n_done}/{self._total} {self._what}, {n_tokens} new tokens, {seconds:.0f} s, {rate:.0f} tokens/s"
            )
            self._write(f"{line}, {more}" if more else line)

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._has_written = True
