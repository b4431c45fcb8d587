"""The progress line on a terminal."""

from __future__ import annotations

import io

import pytest

from radixkv import terminal_progress
from radixkv.terminal_progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(terminal_progress.time, "monotonic", lambda: now[0])
    return now


def test_long_work_shows_one_line_that_is_erased_at_the_end(clock: list[float]) -> None:
    terminal = Terminal()
    with Progress("prompts", 9, stream=terminal) as line:
        for n_done in range(9):
            clock[0] += 0.5
            line.show(n_done, 10 * n_done)
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[1] == "1/9 prompts, 10 new tokens, 1 s, 10 tokens/s"
    assert lines[-2:] == ["8/9 prompts, 80 new tokens, 4 s, 18 tokens/s", ""]


def test_details_follow_the_line(clock: list[float]) -> None:
    terminal = Terminal()
    with Progress("requests", 9, stream=terminal) as line:
        clock[0] += 2
        line.show(4, 30, "3 in flight")
    assert terminal.getvalue().split("\r\x1b[K")[1] == "4/9 requests, 30 new tokens, 2 s, 15 tokens/s, 3 in flight"


def test_not_every_call_writes(clock: list[float]) -> None:
    terminal = Terminal()
    clock[0] += 5
    line = Progress("prompts", 9, stream=terminal)
    clock[0] += 2
    for _ in range(1000):
        clock[0] += 0.001
        line.show(1, 1)
    assert terminal.getvalue().count("\r") == 5


@pytest.mark.parametrize("kind", ["short work", "no terminal", "disabled"])
def test_nothing_is_written(clock: list[float], kind: str) -> None:
    stream = io.StringIO() if kind == "no terminal" else Terminal()
    with Progress("prompts", 1, enabled=kind != "disabled", stream=stream) as line:
        clock[0] += 0.5 if kind == "short work" else 60
        line.show(1, 1)
    assert stream.getvalue() == ""
