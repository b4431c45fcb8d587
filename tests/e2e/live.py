"""A real server process and what tests ask of it."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

READY = re.compile(r"radixkv ready on (http://127\.0\.0\.1:\d+) \(model \S+, (\d+) pages of 16 tokens\)")
CANARY = {
    "prompt": "Question: what is 2 + 2?\nAnswer:",
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> float:
    """Waits until something holds; how long that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, what
        time.sleep(0.02)
    return time.monotonic() - begun


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Live:
    """A running ``radixkv serve``."""

    def __init__(self, process: subprocess.Popen[str], base_url: str, n_pages: int) -> None:
        self.process = process
        self.http = httpx.Client(base_url=base_url, timeout=30)
        self.base_url = base_url
        self.port = int(base_url.rsplit(":", 1)[1])
        self.n_pages = n_pages
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.runtime_pid = int(child)

    def complete(self, **body: object) -> dict[str, object]:
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def canary(self) -> list[int]:
        return self.complete(**CANARY)["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return float(re.search(rf"^radixkv:{name} (\S+)$", text, re.MULTILINE)[1])

    def is_idle(self) -> bool:
        """Nothing runs or waits, and every page is free or evictable."""
        n_at_rest = self.metric("kv_pages_free") + self.metric("kv_pages_evictable")
        return n_at_rest == self.n_pages and self.metric("num_requests_running") == 0 == self.metric(
            "num_requests_waiting"
        )


@contextmanager
def serving(cache: Path, errors: Path, *flags: str) -> Iterator[Live]:
    """A server on a free port. Afterwards neither process is left."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(errors.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "radixkv.cli", "serve", "--port", "0", "--kv-cache-memory-bytes", "33554432"]
    with errors.open("w") as log:
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    live = None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout=60), "not ready within 60 s"
        line = process.stdout.readline()
        match = READY.fullmatch(line.rstrip("\n"))
        assert match, f"{line!r}, then {errors.read_text()}"
        live = Live(process, match[1], int(match[2]))
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        process.stdout.close()
        if live is not None:
            live.http.close()
            wait_for(lambda: not is_running(live.runtime_pid), "the runtime is still there", 5)
