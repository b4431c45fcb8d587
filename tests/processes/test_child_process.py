"""Child processes and the ways in which they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from radixkv.processes.child_process import ChildProcess

END_LIMIT_S = 20.0
"""Limit of the wait for the end of a process, which would end by itself in ``LIFETIME_S``."""
LIFETIME_S = 90

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\nprint('end', flush=True)"
STUBBORN = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({LIFETIME_S})"])
print(grandchild.pid, flush=True)
time.sleep({LIFETIME_S})
"""


def has_ended(pid: int) -> bool:
    """Returns whether the process has ended within the time limit."""
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_lines_go_in_and_come_out_until_standard_input_is_closed() -> None:
    async def talk() -> list[bytes]:
        child = await ChildProcess.start([sys.executable, "-c", ECHO])
        child.send_line(b"one")
        first = await child.read_line()
        child.send_line(b"two")
        second = await child.read_line()
        await child.close()
        return [first, second]

    assert asyncio.run(talk()) == [b"ONE\n", b"TWO\n"]


def test_the_output_and_the_exit_code_of_a_process_that_ends_are_kept() -> None:
    async def run() -> tuple[int, bytes]:
        child = await ChildProcess.start([sys.executable, "-c", "print('done'); raise SystemExit(7)"])
        code = await child.wait()
        output = await child.read()
        child.send_signal(signal.SIGTERM)  # nobody is there any more
        child.kill()
        await child.close()
        return code, output

    assert asyncio.run(run()) == (7, b"done\n")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_line_to_a_process_that_has_been_killed_is_dropped(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def run() -> bytes:
        process = await ChildProcess.start([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            process.kill()
            await process.wait()
            for _ in range(3):
                process.send_line(b"one")
                await asyncio.sleep(0.05)
            return await process.read_line()
        finally:
            await process.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == b""


def test_a_process_that_ignores_sigterm_is_killed_with_its_group() -> None:
    async def run() -> tuple[int | None, int]:
        child = await ChildProcess.start([sys.executable, "-c", STUBBORN])
        grandchild = int(await child.read_line())
        async with asyncio.timeout(END_LIMIT_S):  # the grandchild holds the pipe of standard output
            await child.stop(0.2)
        return child.return_code, grandchild

    code, grandchild = asyncio.run(run())
    assert code == -signal.SIGKILL
    assert has_ended(grandchild)


def test_a_stop_that_is_cancelled_kills_at_once() -> None:
    async def run() -> tuple[int | None, int]:
        child = await ChildProcess.start([sys.executable, "-c", STUBBORN])
        grandchild = int(await child.read_line())
        stopping = asyncio.create_task(child.stop(LIFETIME_S))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping], timeout=END_LIMIT_S)
        code = child.return_code
        await child.close()
        return code, grandchild

    code, grandchild = asyncio.run(run())
    assert code == -signal.SIGKILL
    assert has_ended(grandchild)


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The child ignores its standard input, so only the kernel's signal can end it."""
    log = tmp_path / "log"
    child = f"import os, time; print(os.getpid(), flush=True); time.sleep({LIFETIME_S})"
    parent = f"""
import asyncio, sys
from radixkv.processes.child_process import ChildProcess
async def main():
    with open({str(log)!r}, "wb") as log:
        child = await ChildProcess.start([sys.executable, "-c", {child!r}], output=log)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        while not log.exists() or not log.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.01)
        pid = int(log.read_text())
        os.kill(pid, 0)
        process.kill()
    assert has_ended(pid)
