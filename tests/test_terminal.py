"""Tables and progress, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from radixkv import terminal
from radixkv.terminal import Progress, Table, table
from support.live import LIMIT_S

ERASE = "\r\x1b[2K"
END = "\n\x1b[?25h\r\x1b[1A\x1b[2K"
"""Shows the cursor, and erases the line above it."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "START_DELAY_S", 0.01)
    monkeypatch.setattr(terminal, "REFRESH_S", 0.01)
    monkeypatch.setattr(terminal, "LINE_PERIOD_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_terminal_shows_one_live_line_that_is_erased_at_the_end() -> None:
    terminal = Terminal()
    with Progress("replaying", stream=terminal) as progress:
        wait_for(lambda: terminal.getvalue().count(ERASE) > 2)
        progress.show("4/9 requests, 30 new tokens", 30)
        wait_for(lambda: "4/9" in terminal.getvalue())
    assert terminal.getvalue().endswith(END)
    shown = terminal.getvalue().removesuffix(END)
    assert "\n" not in shown
    first, *lines = shown.split(ERASE)
    assert first.endswith("replaying, 0 s")
    line = r"replaying: 4/9 requests, 30 new tokens, \d+ tokens/s, 0 s"
    assert re.fullmatch(line, lines[-1])


@pytest.mark.parametrize("pipe", [io.StringIO(), Terminal()], ids=["pipe", "dumb terminal"])
def test_elsewhere_there_is_a_line_now_and_then(pipe: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress("replaying", stream=pipe):
        wait_for(lambda: pipe.getvalue().count("\n") > 2)
    assert set(pipe.getvalue().splitlines()) == {"radixkv: replaying, 0 s"}


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_a_log_has_lines_only_and_the_first_at_once(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "START_DELAY_S", LIMIT_S)
    with Progress("loading", is_log=True, stream=stream):
        wait_for(lambda: stream.getvalue().count("\n") > 1)
    first, second, *_ = stream.getvalue().splitlines()
    assert (first, second) == ("radixkv: loading", "radixkv: loading, 0 s")


def test_a_line_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with Progress("replaying a very long name", stream=terminal):
        wait_for(lambda: ERASE in terminal.getvalue())
    assert terminal.getvalue().split(ERASE)[1] == "replaying a very lo…"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
@pytest.mark.parametrize("enabled", [True, False])
def test_short_or_disabled_work_shows_nothing(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    if enabled:
        monkeypatch.setattr(terminal, "START_DELAY_S", LIMIT_S)
    with Progress("replaying", enabled=enabled, stream=stream) as progress:
        progress.show("1/1", 1)
    assert stream.getvalue() == ""


def test_a_closed_stream_does_not_end_the_work() -> None:
    stream = io.StringIO()
    with Progress("replaying", stream=stream):
        wait_for(lambda: bool(stream.getvalue()))
        stream.close()


def test_without_standard_error_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("replaying") as progress:
        progress.show("4/9 requests")
        time.sleep(0.05)


COLUMNS = ("name", "many tokens", "share")
ROWS = [("[red]", "1,234", "5%"), ("b", "12", "100%")]


def test_a_table_is_aligned_and_its_cells_are_no_markup() -> None:
    assert table(COLUMNS, ROWS, indent=1).split("\n") == [
        " name   many tokens  share",
        " [red]        1,234     5%",
        " b               12   100%",
    ]
    assert table(COLUMNS, ROWS, align="<").split("\n")[2] == "b      12           100%"
    assert table(COLUMNS, []) == "name  many tokens  share"


def test_a_table_with_too_many_columns_has_titles_on_several_lines_then_becomes_several_tables() -> None:
    titles = ["key", *(f"column {number}" for number in range(11))]
    shown = Table(titles, [3, *[5] * 11])
    row = [str(number) for number in range(12)]
    assert shown.text([row]).split("\n") == [
        f"     {'  '.join(['column'] * 11)}",
        f"key  {'  '.join(f'{number:>6}' for number in range(11))}",
        f"0    {'  '.join(f'{number:>6}' for number in range(1, 12))}",
    ]
    wide = Table(titles, [3, *[30] * 11])
    first, second, *_ = wide.text([row]).split("\n\n")
    assert (first.split(), second.split()) == (
        "key column 0 column 1 column 2 0 1 2 3".split(),
        "key column 3 column 4 column 5 0 4 5 6".split(),
    )
    assert wide.header() + "\n" + wide.row(row) + "\n" + wide.rest([row]) == wide.text([row]) + "\n"
    assert max(map(len, wide.text([row]).split("\n"))) <= 100


def test_a_terminal_has_bold_titles_and_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "20")
    lines = table(COLUMNS, ROWS).split("\n")
    assert "\x1b[1m" in lines[0]
    plain = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in lines]
    assert plain == ["         many", "name   tokens  share", "[red]   1,234     5%", "b          12   100%"]
