"""The server under chaos, and what must be true of it after each fault."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from server import resident_bytes

from chaos.clock import set_clock
from support.live import LIMIT_S, LiveServer, children, open_files, serving, wait_for

HEARTBEAT_TIMEOUT_S = 5
N_DISK_BYTES = 24 << 20
FLAGS = (
    *("--max-total-tokens", "6144", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"),
    *("--max-queued-requests", "64", "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S), "--canary-interval", "2"),
    *("--host-memory", "16MiB", "--load-policy", "always", "--cache-dir-size", str(N_DISK_BYTES)),
    "--restart-runtime",
)
REST_LIMIT_S = 60.0
"""How long the server may take to be as it was before the first fault."""
N_GROWTH_BYTES = {"frontend": 64 << 20, "runtime": 192 << 20}
"""How much each process may grow after the first load."""
SPARE = {"/", "/dev/null"}
"""libuv keeps one of these open, and closes it to refuse a connection when it can open no other file."""
_SLACK_BYTES = 1 << 20
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? "
CANARY = {"prompt": STORY * 4, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class ChaosFailed(Exception):
    """What was promised is not so."""


@dataclass
class World:
    """A server in a folder, which can be started anew.

    Args:
        model: the folder of the checkpoint.
        folder: for the disk tier, logs, sockets and the clock.
    """

    model: Path
    folder: Path
    live: LiveServer = field(init=False)
    samples: list[dict[str, int]] = field(default_factory=list)
    n_starts: int = 0
    n_restarts: int = 0
    """How often the runtime of the server that now runs should have been started again."""
    _logged_ids: set[str] = field(default_factory=set)
    _log_offset: int = 0
    _canary: list[int] = field(init=False)
    _files: dict[str, Counter[str]] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    @property
    def request_log(self) -> Path:
        return self.folder / "requests"

    @property
    def errors(self) -> Path:
        """What the server that runs wrote to standard error."""
        return self.folder / f"errors-{self.n_starts}"

    def start(self, entry: list[str]) -> None:
        """Starts a server, and ends the one before."""
        self._stack.close()
        set_clock(self.clock, 0)
        self.n_starts += 1
        self.n_restarts = 0
        flags = (*FLAGS, "--cache-dir", str(self.folder / "cache"), "--request-log", str(self.request_log))
        self.live = self._stack.enter_context(serving(self.model, self.errors, *flags, entry=entry))

    def stop(self) -> None:
        """Kills the server, and waits for the end of both processes."""
        self._stack.close()

    def wait_for_next_runtime(self) -> None:
        """Waits until another runtime serves in place of the one before."""
        self.n_restarts += 1
        wait_for(self._has_restarted, "the runtime is not started again")
        (self.live.runtime_pid,) = children(self.live.process.pid)

    def _has_restarted(self) -> bool:
        if self.live.process.poll() is not None:
            raise ChaosFailed(f"the server has ended with {self.live.process.returncode}")
        if self.live.http.get("/metrics").status_code != 200:
            return False
        return self.live.metric("runtime_restarts_total") >= self.n_restarts

    def remember(self) -> None:
        """Takes the state after a load without faults as what later states are compared with."""
        self._canary = self._answer()
        wait_for(self.live.is_idle, "pages or requests are left")
        time.sleep(5.5)  # idle connections of the clients are closed by then
        self._files, self._bytes = self._open_files(), self._resident_bytes()

    def check_at_rest(self) -> None:
        """Checks the server without load. Raises ``ChaosFailed``."""
        if self.live.process.poll() is not None:
            raise ChaosFailed(f"the server has ended with {self.live.process.returncode}")
        for what in ("the first", "the cached"):
            if (answer := self._answer()) != self._canary:
                raise ChaosFailed(f"{what} canary says {answer}, not {self._canary}")
        _wait(self.live.is_idle, lambda: f"pages or requests are left: {self.live.http.get('/metrics').text}")
        metrics = dict(zip(NAMES, self.live.metrics(*NAMES), strict=True))
        if metrics["runtime_restarts_total"] != self.n_restarts:
            raise ChaosFailed(f"the runtime was started again {metrics}, not {self.n_restarts} times")
        if any("canary_failures_total" in line and not line.endswith(" 0.0") for line in self._metric_lines()):
            raise ChaosFailed("the server's own canary failed")
        _wait(lambda: self._open_files() == self._files, self._describe_files)
        sizes = self._resident_bytes()
        grown = {side: sizes[side] - self._bytes[side] for side in sizes}
        if any(grown[side] > N_GROWTH_BYTES[side] for side in grown):
            raise ChaosFailed(f"the processes have grown by {grown} bytes")
        n_disk = sum(path.stat().st_size for path in (self.folder / "cache").rglob("*") if path.is_file())
        if n_disk > N_DISK_BYTES + _SLACK_BYTES:
            raise ChaosFailed(f"the disk tier takes {n_disk} bytes, more than {N_DISK_BYTES}")
        self.samples.append({f"{side}_bytes": size for side, size in sizes.items()} | {"disk_bytes": n_disk})

    def check_request_log(self, *, has_fragments: bool) -> None:
        """Checks the lines since the last call: no request ended twice. Raises ``ChaosFailed``.

        Args:
            has_fragments: whether the disk was full, so that parts of lines are there.
        """
        with self.request_log.open() as log:
            log.seek(self._log_offset)
            lines = log.readlines()
            self._log_offset = log.tell()
        for line in lines:
            try:
                request_id = json.loads(line)["id"]
            except ValueError:
                if has_fragments:
                    continue
                raise ChaosFailed(f"a line of the log of requests is not JSON: {line!r}") from None
            if request_id in self._logged_ids:
                raise ChaosFailed(f"the log of requests has {request_id} twice")
            self._logged_ids.add(request_id)

    def _answer(self) -> list[int]:
        reply: Any = self.live.http.post("/v1/completions", json=CANARY)
        if reply.status_code != 200:
            raise ChaosFailed(f"the canary is not answered: {reply.text}")
        return list(reply.json()["choices"][0]["token_ids"])

    def _metric_lines(self) -> list[str]:
        return [line for line in self.live.http.get("/metrics").text.splitlines() if not line.startswith("#")]

    def _pids(self) -> dict[str, int]:
        return {"frontend": self.live.process.pid, "runtime": self.live.runtime_pid}

    def _open_files(self) -> dict[str, Counter[str]]:
        self.live.http.get("/health")  # so that this connection is always among the files
        own = str(self.folder)
        return {
            side: Counter(
                "of this server" if own in name else name for name in open_files(pid) if name not in SPARE
            )
            for side, pid in self._pids().items()
        }

    def _describe_files(self) -> str:
        now = self._open_files()
        parts = [
            f"{side}: more {dict(now[side] - before)}, fewer {dict(before - now[side])}"
            for side, before in self._files.items()
        ]
        return f"open files differ; {'; '.join(parts)}"

    def _resident_bytes(self) -> dict[str, int]:
        return {side: resident_bytes(pid) for side, pid in self._pids().items()}


NAMES = ("runtime_restarts_total", "kv_pages_free", "kv_pages_evictable")


def _wait(condition: Any, describe: Any) -> None:
    deadline = time.monotonic() + REST_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ChaosFailed(describe())
        time.sleep(0.1)


def post(live: LiveServer, body: dict[str, Any]) -> httpx.Response:
    """Sends a completion on a connection of its own."""
    return httpx.post(f"{live.base_url}/v1/completions", json=body, timeout=LIMIT_S)
