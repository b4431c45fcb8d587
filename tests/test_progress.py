"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from radixkv import terminal_progress
from radixkv.terminal_progress import Progress
from support.live import LIMIT_S

ERASE = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_progress, "START_DELAY_S", 0.01)
    monkeypatch.setattr(terminal_progress, "REFRESH_S", 0.01)
    monkeypatch.setattr(terminal_progress, "LINE_PERIOD_S", 0.01)


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
    assert "\n" not in terminal.getvalue()
    empty, first, *lines, last = terminal.getvalue().split(ERASE)
    assert (empty, first, last) == ("", "replaying, 0 s", "")
    line = r"replaying: 4/9 requests, 30 new tokens, \d+ tokens/s, 0 s"
    assert re.fullmatch(line, lines[-1])


def test_elsewhere_there_is_a_line_now_and_then() -> None:
    pipe = io.StringIO()
    with Progress("replaying", stream=pipe):
        wait_for(lambda: pipe.getvalue().count("\n") > 2)
    assert set(pipe.getvalue().splitlines()) == {"radixkv: replaying, 0 s"}


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_a_log_has_lines_only_and_the_first_at_once(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_progress, "START_DELAY_S", LIMIT_S)
    with Progress("loading", is_log=True, stream=stream):
        wait_for(lambda: stream.getvalue().count("\n") > 1)
    first, second, *_ = stream.getvalue().splitlines()
    assert (first, second) == ("radixkv: loading", "radixkv: loading, 0 s")


def test_a_line_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with Progress("replaying a very long name", stream=terminal):
        wait_for(lambda: ERASE in terminal.getvalue())
    assert terminal.getvalue().split(ERASE)[1] == "replaying a very lo"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
@pytest.mark.parametrize("enabled", [True, False])
def test_short_or_disabled_work_shows_nothing(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    if enabled:
        monkeypatch.setattr(terminal_progress, "START_DELAY_S", LIMIT_S)
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
