"""A real server process with helpers for tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(
    r"radixkv ready on (http://127\.0\.0\.1:\d+) \(model \S+, (\d+) pages of 16 tokens, \w+ on ([\w ]+)"
    r"(?:, in each of \d+ replicas)?\)"
)
COMMAND_LINE = (sys.executable, "-m", "radixkv.cli")
HERE = Path(__file__).parent
# Errors of reading /proc for a process that ends before its file is opened or read.
PROCESS_GONE = (FileNotFoundError, ProcessLookupError)
LIMIT_S = 120.0
"""Timeout of all waits; long enough for a busy machine, so that only failures reach it."""
KEEPALIVE_S = 2.0
"""How long an idle connection may be reused. The server closes it after 5 s, and a request sent then fails."""
CANARY = {
    "prompt": "Question: what is 2 + 2?\nAnswer:",
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


def complaints(stderr: str) -> str:
    """Returns what a command wrote to standard error apart from its progress, which depends on time."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("radixkv: "))


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits until ``condition`` is true; fails with ``what`` after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except PROCESS_GONE:
        return False


def children(pid: int) -> list[int]:
    """Returns the living children of all threads of a process; none if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(*PROCESS_GONE):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(*PROCESS_GONE):
                pids += map(int, (task / "children").read_text().split())
    return sorted(pids)


def open_files(pid: int) -> list[str]:
    """Returns the targets of a process's open files; sockets and pipes only by kind."""
    files = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(*PROCESS_GONE):
            files.append(re.sub(r":\[\d+\]", "", os.readlink(link)))
    return sorted(files)


class LiveServer:
    """A running ``radixkv serve``."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        base_url: str,
        n_pages: int,
        devices: str,
        folder: Path,
        key: str | None,
    ) -> None:
        self.process = process
        self.devices = devices
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        self.http = httpx.Client(base_url=base_url, timeout=LIMIT_S, headers=headers, limits=limits)
        self.base_url = base_url
        self.port = int(base_url.rsplit(":", 1)[1])
        self.n_pages = n_pages
        self.runtime_pids = children(process.pid)
        self.runtime_pid = self.runtime_pids[0]
        self.folder = folder

    def complete(self, **body: object) -> dict[str, object]:
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def canary(self) -> list[int]:
        return self.complete(**CANARY)["choices"][0]["token_ids"]

    def flush_cache(self) -> None:
        wait_for(lambda: self.http.post("/flush_cache").status_code == 200, "the cache is not flushed")

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Returns the values of metrics at one moment."""
        text = self.http.get("/metrics").text
        return [float(re.search(rf"^radixkv:{name} (\S+)$", text, re.MULTILINE)[1]) for name in names]

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and every page is free or evictable."""
        n_free, n_evictable, *n_requests = self.metrics(
            "kv_pages_free", "kv_pages_evictable", "num_requests_running", "num_requests_waiting"
        )
        return n_free + n_evictable == self.n_pages and n_requests == [0, 0]

    def leftovers_at_rest(self) -> dict[str, Any]:
        """Returns ``leftovers`` once every response is complete."""
        reports: list[dict[str, Any]] = []

        def is_at_rest() -> bool:
            reports.append(self.leftovers())
            return not any("run_asgi" in task for task in reports[-1]["tasks"])

        wait_for(is_at_rest, "a response does not end")
        return reports[-1]

    def leftovers(self) -> dict[str, Any]:
        """Returns tasks, threads, files and children of both processes, for a server behind ``watched_cli``."""
        self.http.get("/health")  # so that this client's connection is always among the files
        return self._report(self.process.pid, "report.json") | {
            "frontend files": open_files(self.process.pid),
            "runtime files": open_files(self.runtime_pid),
            "frontend children": children(self.process.pid),
            "runtime children": children(self.runtime_pid),
            "runtime threads": self._report(self.runtime_pid, "runtime_threads.json"),
        }

    def _report(self, pid: int, name: str) -> Any:
        report = self.folder / name
        report.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        wait_for(report.exists, "no report")
        return json.loads(report.read_text())


@contextmanager
def watched(model: Path, errors: Path, *flags: str) -> Iterator[LiveServer]:
    """Runs a server that reports ``leftovers``, with a runtime that breaks on pairs of ``breaking_runtime``."""
    entry = [sys.executable, str(HERE / "watched_cli.py"), str(errors.parent / "report.json")]
    with serving(model, errors, *flags, entry=[*entry, str(HERE / "breaking_runtime.py")]) as live:
        yield live


@contextmanager
def serving(
    model: Path, errors: Path, *flags: str, key: str | None = None, entry: Sequence[str] = COMMAND_LINE
) -> Iterator[LiveServer]:
    """Runs a server on a free port and checks that neither process outlives the context.

    Args:
        model: the folder of a checkpoint.
        errors: the file for standard error.
        flags: of ``radixkv serve``. Without ``--grammar-backend`` the server starts sooner, without grammars.
        key: the API key, if the server needs one.
        entry: the command that runs ``radixkv``.
    """
    environment = os.environ | {"TMPDIR": str(errors.parent), "OMP_NUM_THREADS": "1"}
    pool = () if "--max-total-tokens" in flags else ("--kv-cache-memory-bytes", "33554432")
    grammars = () if "--grammar-backend" in flags else ("--grammar-backend", "none")
    command = [*entry, "serve", str(model), "--port", "0", *pool, *grammars, *flags]
    if key is not None:
        environment["RADIXKV_API_KEY"] = key
    with errors.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    live = None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout=LIMIT_S), f"not ready within {LIMIT_S:.0f} s"
        line = process.stdout.readline()
        match = READY.fullmatch(line.rstrip("\n"))
        assert match, f"{line!r}, then {errors.read_text()}"
        live = LiveServer(process, match[1], int(match[2]), match[3], folder=errors.parent, key=key)
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=LIMIT_S)
        process.stdout.close()
        if live is not None:
            live.http.close()
            pids = {live.runtime_pid, *live.runtime_pids}
            wait_for(lambda: not any(map(is_running, pids)), "a runtime is still there")
