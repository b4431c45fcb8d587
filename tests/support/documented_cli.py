"""``radixkv`` for the commands of pages: another default port, and ``serve`` returns when the server is ready.

Usage: ``documented_cli.py PORT ARGUMENT...``. The folder ``$SERVERS`` gets the process and the log of each server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from radixkv.settings import client_flags

START_LIMIT_S = 120.0


def serve(arguments: list[str], port: str) -> int:
    """Starts a server, after ending the one that has its port; returns 1 if it does not become ready."""
    if "--port" in arguments:
        port = arguments[arguments.index("--port") + 1]
    else:
        arguments = [*arguments, "--port", port]
    folder = Path(os.environ["SERVERS"])
    pid_file, log = folder / f"server{port}.pid", folder / f"server{port}.log"
    if pid_file.exists():
        with contextlib.suppress(ProcessLookupError):
            end(int(pid_file.read_text()))
    with log.open("w") as output:
        command = [sys.executable, "-m", "radixkv", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    pid_file.write_text(str(process.pid))
    deadline = time.monotonic() + START_LIMIT_S
    while "radixkv ready on" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            print(log.read_text())
            return 1
        time.sleep(0.05)
    return 0


def end(pid: int) -> None:
    """Ends a server, and waits for it to free its port."""
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.05)


def main() -> int:
    port, *arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        return serve(arguments, port)
    client_flags.DEFAULT_URL = f"http://127.0.0.1:{port}"
    from radixkv.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
