from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live import LIMIT_S, LiveServer, is_running, wait_for

Start = Callable[..., AbstractContextManager[LiveServer]]

LONG = {"prompt": "Hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


class BackgroundRequest(threading.Thread):
    """A request sent from another thread."""

    def __init__(self, live: LiveServer, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = live.base_url
        self._body = body
        self.status = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=LIMIT_S) as http:
            try:
                reply = http.post("/v1/completions", json=self._body)
                self.status, self.text = reply.status_code, reply.text
            except httpx.TransportError as error:
                self.text = repr(error)

    def result(self) -> tuple[int, str]:
        self.join(timeout=LIMIT_S)
        assert not self.is_alive(), "the request hangs"
        return self.status, self.text


def running(live: LiveServer, n: int) -> None:
    wait_for(lambda: live.metric("num_requests_running") == n, f"{n} requests never ran")


def is_healthy(live: LiveServer) -> bool:
    return live.http.get("/health").status_code == 200


def test_a_killed_runtime_ends_all_with_an_error(start_without_timeouts: Start) -> None:
    """Later requests fail, too. ``test_a_hung_runtime_ends_all_at_the_heartbeat_limit`` exits without a signal."""
    with start_without_timeouts("--heartbeat-timeout", "3600") as live:
        whole, streamed = BackgroundRequest(live, **LONG), BackgroundRequest(live, **LONG, stream=True)
        wait_for(lambda: live.metric("time_to_first_token_seconds_count") == 2, "the stream has not begun")
        os.kill(live.runtime_pid, signal.SIGKILL)
        wait_for(lambda: not is_healthy(live), "still healthy")
        assert live.http.get("/health").status_code == 503
        status, text = whole.result()
        assert status == 503
        assert json.loads(text)["error"]["code"] == "runtime_died"
        status, text = streamed.result()
        assert status == 200
        *_, error, done, end = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "runtime_died"
        assert (done, end) == ("data: [DONE]", "")
        assert live.http.post("/v1/completions", json=LONG).status_code == 503
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(timeout=LIMIT_S) == 1


@pytest.mark.nightly
def test_a_hung_runtime_ends_all_at_the_heartbeat_limit(start: Start) -> None:
    with start("--heartbeat-timeout", "5") as live:
        request = BackgroundRequest(live, **LONG)
        running(live, 1)
        os.kill(live.runtime_pid, signal.SIGSTOP)
        status, text = request.result()
        assert status == 503
        assert "silent for 5 s" in json.loads(text)["error"]["message"]
        assert live.process.wait(timeout=LIMIT_S) == 1
        assert not is_running(live.runtime_pid)


@pytest.mark.nightly
def test_the_runtime_ends_with_a_killed_frontend(start: Start) -> None:
    with start() as live:
        BackgroundRequest(live, **{**LONG, "prompt": ["x " * 2000] * 8})
        running(live, 8)
        live.process.kill()
        wait_for(lambda: not is_running(live.runtime_pid), "the runtime is still there")


@pytest.mark.nightly
def test_sigterm_lets_running_requests_end_and_no_stalled_uploads(
    start_without_timeouts: Start, tmp_path: Path
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with start_without_timeouts() as live:
        gone, slow = (socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) for _ in range(2))
        for connection in (gone, slow):
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        gone.close()
        request = BackgroundRequest(live, **{**LONG, "max_tokens": 500})
        running(live, 1)
        os.kill(live.runtime_pid, signal.SIGSTOP)  # stands for a step that outlasts the checks below
        live.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not is_healthy(live), "still healthy")
        assert live.http.get("/health").status_code == 503
        refused = live.http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        wait_for(lambda: "radixkv: shutting down: " in (tmp_path / "errors").read_text(), "no line in the log")
        os.kill(live.runtime_pid, signal.SIGCONT)
        status, text = request.result()
        assert status == 200
        assert json.loads(text)["usage"]["completion_tokens"] == 500
        assert live.process.wait(timeout=LIMIT_S) == 0
        assert slow.recv(100).startswith(b"HTTP/1.1 503 ")
        slow.close()
        stages = (tmp_path / "errors").read_text().splitlines()
        verbs = dict.fromkeys(line.split()[1] for line in stages)  # a long stage is named more than once
        verbs = [verb for verb in verbs if verb.isalpha() and verb != "still"]  # a slow run has statistics, too
        assert verbs == ["getting", "loading", "ready", "SIGTERM", "shutting"]


@pytest.mark.nightly
def test_disconnects_cancel_queued_requests(start: Start) -> None:
    """There are more prompts than rows, so some never run."""
    with start("--max-num-seqs", "4") as live:
        with httpx.Client(base_url=live.base_url, timeout=LIMIT_S) as http:
            for i in range(4):
                body = {"prompt": [f"{i} hello"] * 64, "max_tokens": 4000, "ignore_eos": True, "stream": True}
                with http.stream("POST", "/v1/completions", json=body) as reply:
                    lines = reply.iter_lines()  # kept alive: the connection closes with it
                    next(lines)
                    wait_for(lambda: live.metric("num_requests_waiting") == 60, "60 do not wait")
        wait_for(live.is_idle, "still held")


@pytest.mark.nightly
def test_too_little_memory_is_reported_in_one_line() -> None:
    flags = ["--port", "0", "--max-num-seqs", "100000000", "--max-num-batched-tokens", "200000000"]
    flags += ["--grammar-backend", "none"]
    ended = subprocess.run(
        [sys.executable, "-m", "radixkv.cli", "serve", *flags], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode != 0
    *stages, reason = ended.stderr.splitlines()
    assert all(line.startswith("radixkv: ") for line in stages), ended.stderr
    assert reason.startswith("radixkv serve: error: ")
    assert "max_num_seqs" in reason or "--max-num-seqs" in reason


@pytest.mark.nightly
def test_a_second_signal_does_not_wait(start_without_timeouts: Start) -> None:
    with start_without_timeouts("--heartbeat-timeout", "3600") as live:
        request = BackgroundRequest(live, **LONG)
        running(live, 1)
        os.kill(live.runtime_pid, signal.SIGSTOP)  # stands for a long step
        live.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not is_healthy(live), "still healthy")
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(timeout=LIMIT_S) == 0
        assert request.result()[0] in (0, 503)
