"""SIGTERM and Ctrl-C end a start wherever it waits, and leave no process and no file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from select import select

import pytest

from support.cases import rest_nightly
from support.live import COMMAND_LINE, HERE, LIMIT_S, children, is_running, wait_for

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def interrupt(
    command: Sequence[str], folder: Path, number: int, is_waiting: Callable[[int, str], bool]
) -> tuple[int, list[str]]:
    """Runs a command, sends it a signal once it waits, and returns its exit code and its log.

    Checks that the command's children end, too, and that no temporary file is left.

    Args:
        command: the command, which must wait without end.
        folder: for temporary files and the log.
        number: the signal.
        is_waiting: whether a process with this id and this log waits.
    """
    (scratch := folder / "t").mkdir()
    with (folder / "errors").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"TMPDIR": str(scratch)})
    try:
        wait_for(lambda: is_waiting(process.pid, (folder / "errors").read_text()), "the start never waits")
        processes = children(process.pid)
        process.send_signal(number)
        code = process.wait(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
    wait_for(lambda: not any(map(is_running, processes)), "a child is left")
    assert [str(path) for path in scratch.rglob("*")] == []
    return code, (folder / "errors").read_text().splitlines()


def handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for the signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.nightly
@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_that_waits_for_the_hub(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        command = [*COMMAND_LINE, "serve", "org/model", "--port", "0"]
        code, log = interrupt(command, tmp_path, number, lambda *_: bool(select([silent_hub], [], [], 0)[0]))
    assert code == 128 + number
    assert signal.Signals(number).name in log[-1]


@pytest.mark.parametrize("number", rest_nightly(SIGNALS, kept=(1,)))
def test_a_start_that_waits_for_the_runtime(number: int, sensitive: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "stuck_cli.py"), "runtime", "serve", str(sensitive), "--port", "0"]

    def is_waiting(pid: int, log: str) -> bool:
        return "waiting" in log and bool(children(pid)) and handles(pid, number)

    code, log = interrupt(command, tmp_path, number, is_waiting)
    assert code == 128 + number
    assert signal.Signals(number).name in log[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_that_reads_a_huge_tokenizer(number: int, sensitive: Path, tmp_path: Path) -> None:
    """The kernel ends it, because no handler can run."""
    command = [sys.executable, str(HERE / "stuck_cli.py"), "tokenizer", "serve", str(sensitive), "--port", "0"]
    code, _ = interrupt(command, tmp_path, number, lambda _, log: "waiting" in log)
    assert code == -number
