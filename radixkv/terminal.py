"""What commands print: tables, wrapped text, and progress on standard error."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, TextIO

MAX_COLUMNS = 100
"""Most characters of a printed line without a terminal, and of prose with one."""
GAP = 2
"""Spaces between two columns of a table."""
START_DELAY_S = 0.5
"""Work that ends within this time shows no progress."""
REFRESH_S = 0.2
"""Time between two updates of the live line on a terminal."""
LINE_PERIOD_S = 10.0
"""Time between two lines where the stream is not a terminal."""


def wrapped(text: str, hanging: int = 2) -> str:
    """Wraps each line of a text between words at ``MAX_COLUMNS``; what follows is indented by ``hanging``."""
    indent = " " * hanging
    return "\n".join(
        textwrap.fill(line, MAX_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = ">", indent: int = 0) -> str:
    """Returns a table of rows that are all known; see ``Table``."""
    columns = zip(*rows, strict=True) if rows else [()] * len(titles)
    widths = [max(map(len, cells), default=0) for cells in columns]
    return Table(titles, widths, align=align, indent=indent).text(rows)


class Table:
    """A table whose rows can be printed as they come, on standard output.

    A table that is too wide for the terminal, or without one for ``MAX_COLUMNS``, has its titles on several lines.
    If that does not suffice, it becomes several, one below the other, each with the first ``n_keys`` columns. On a
    terminal the titles are bold.

    Args:
        titles: of the columns.
        widths: characters that the cells of each column take at least.
        align: ``>`` or ``<`` for all columns but the first, or a character for each of them.
        n_keys: columns that say which row it is.
        indent: spaces before each line.
    """

    def __init__(
        self, titles: Sequence[str], widths: Sequence[int], *, align: str = ">", n_keys: int = 1, indent: int = 0
    ) -> None:
        self.titles = titles
        self._align = "<" + (align * (len(titles) - 1) if len(align) == 1 else align)
        self._indent = indent
        self._is_terminal = sys.stdout.isatty()
        self._room = shutil.get_terminal_size().columns if self._is_terminal else MAX_COLUMNS
        self._widths = [max(len(title), width) for title, width in zip(titles, widths, strict=True)]
        if not self._fits(range(len(titles))):
            words = [max(map(len, title.split()), default=0) for title in titles]
            self._widths = [max(word, width) for word, width in zip(words, widths, strict=True)]
        keys = list(range(n_keys))
        self._parts = [keys]
        for index in range(n_keys, len(titles)):
            if self._parts[-1] != keys and not self._fits([*self._parts[-1], index]):
                self._parts.append(keys)
            self._parts[-1] = [*self._parts[-1], index]

    def header(self) -> str:
        """Returns the titles of the first table."""
        return self._drawn(self._parts[0], [], has_titles=True)

    def row(self, cells: Sequence[str]) -> str:
        """Returns a line of the first table."""
        return self._drawn(self._parts[0], [cells], has_titles=False)

    def rest(self, rows: Sequence[Sequence[str]]) -> str:
        """Returns the other tables, with an empty line before each; nothing if all columns fit into the first."""
        return "".join(f"\n{self._drawn(part, rows, has_titles=True)}\n" for part in self._parts[1:])

    def text(self, rows: Sequence[Sequence[str]]) -> str:
        """Returns all tables."""
        return "\n\n".join(self._drawn(part, rows, has_titles=True) for part in self._parts)

    def _fits(self, part: Iterable[int]) -> bool:
        return self._indent - GAP + sum(GAP + self._widths[index] for index in part) <= self._room

    def _drawn(self, part: Sequence[int], rows: Sequence[Sequence[str]], *, has_titles: bool) -> str:
        from rich import table as rich_table
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        drawn = rich_table.Table(box=None, show_header=has_titles, padding=(0, GAP, 0, 0), pad_edge=False)
        for index in part:
            drawn.add_column(
                Text(self.titles[index], "bold"),
                justify="right" if self._align[index] == ">" else "left",
                width=self._widths[index],
                vertical="bottom",
                overflow="fold",  # no digit is cut
            )
        for cells in rows:
            drawn.add_row(*(Text(cells[index]) for index in part))
        width = self._indent + sum(GAP + self._widths[index] for index in part)
        console = Console(file=io.StringIO(), width=width, force_terminal=self._is_terminal)
        with console.capture() as captured:
            console.print(Padding(drawn, (0, 0, 0, self._indent)))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Progress:
    """Shows what a command does and that it goes on; a context manager.

    On a terminal that can erase, this is one live line, erased at the end. Elsewhere it is a line, repeated every
    ``LINE_PERIOD_S``. Work that ends within ``START_DELAY_S`` shows nothing. A thread writes: work that reports
    nothing meanwhile is also shown to go on.

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
                self._write_line(self._activity)
            elif self._ended.wait(START_DELAY_S) or self._shows_live_line():
                return
            else:
                self._write_line(self._text())
            while not self._ended.wait(LINE_PERIOD_S):
                self._write_line(self._text())

    def _write_line(self, text: str) -> None:
        self._stream.write(f"radixkv: {text}\n")
        self._stream.flush()

    def _shows_live_line(self) -> bool:
        """Shows the live line until the end; returns at once and False if the stream cannot."""
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=self._stream, force_terminal=self._stream.isatty())
        if not console.is_interactive:
            return False
        with Live(
            get_renderable=lambda: Text(self._text(), no_wrap=True, overflow="ellipsis"),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            live.refresh()
            while not self._ended.wait(REFRESH_S):
                live.refresh()
        return True

    def _text(self) -> str:
        seconds = time.monotonic() - self._started_at
        parts = [f"{self._activity}: {self._details}" if self._details else self._activity]
        if self._n_tokens is not None:
            parts.append(f"{self._n_tokens / seconds:.0f} tokens/s")
        return f"{', '.join(parts)}, {seconds:.0f} s"


@contextlib.contextmanager
def shown_download(model: str, show: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Yields ``show``, or without it a function that shows its texts in a line on standard error."""
    with Progress(f"getting the model {model}", enabled=show is None) as progress:
        yield show or progress.show
