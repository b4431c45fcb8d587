"""More work than the server takes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from support.live import COMMAND_LINE, LIMIT_S, Live, serving, wait_for

LONG = {"max_tokens": 2000, "ignore_eos": True}


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(unharmed: Live) -> None:
    body = {**LONG, "prompt": [f"{i} hello" for i in range(64)]}
    reply = unharmed.http.post("/v1/completions", json=body)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["code"] == "queue_full"
    wait_for(unharmed.is_idle, "the rest of the batch goes on")
    reply = unharmed.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    assert reply.status_code == 200


def test_a_full_queue_in_a_stream(unharmed: Live) -> None:
    """It is refused, or ends with an error if some of its prompts ran before the last was refused."""
    body = {**LONG, "prompt": [f"{i} hello" for i in range(64)], "stream": True}
    reply = unharmed.http.post("/v1/completions", json=body)
    if reply.status_code == 503:
        error = reply.json()
    else:
        *_, last, done, end = reply.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))
    assert error["error"]["code"] == "queue_full"


def test_nobody_waits_longer_than_the_limit(start: Callable[..., AbstractContextManager[Live]]) -> None:
    longest = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with start("--max-num-seqs", "1", "--queue-timeout", "1") as live:
        before = live.canary()
        with live.http.stream("POST", "/v1/completions", json=longest) as first:
            lines = first.iter_lines()  # kept: the connection ends with it
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            refused = live.http.post("/v1/completions", json={"prompt": "another"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_timeout"
        wait_for(live.is_idle, "pages or requests are left")
        assert live.canary() == before


def test_more_clients_than_the_soft_limit_of_files_are_answered(sensitive: Path, tmp_path: Path) -> None:
    limited = ["/bin/sh", "-c", 'ulimit -S -n 128 && exec "$@"', "sh", *COMMAND_LINE]
    with serving(sensitive, tmp_path / "errors", entry=limited) as live, ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S))
            for _ in range(200)
        ]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
