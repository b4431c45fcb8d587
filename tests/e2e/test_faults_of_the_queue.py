"""More requests than the queue accepts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from support.live import COMMAND_LINE, LIMIT_S, LiveServer, serving, wait_for

LONG = {"max_tokens": 2000, "ignore_eos": True}


def test_a_full_queue_refuses_at_once_with_retry_after(checked_server: LiveServer) -> None:
    body = {**LONG, "prompt": [f"{i} hello" for i in range(64)]}
    reply = checked_server.http.post("/v1/completions", json=body)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["code"] == "queue_full"
    wait_for(checked_server.is_idle, "the rest of the batch goes on")
    reply = checked_server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    assert reply.status_code == 200


@pytest.mark.nightly
def test_a_full_queue_in_a_stream(checked_server: LiveServer) -> None:
    """The request is refused, or its stream ends with an error if some of its prompts already ran."""
    body = {**LONG, "prompt": [f"{i} hello" for i in range(64)], "stream": True}
    reply = checked_server.http.post("/v1/completions", json=body)
    if reply.status_code == 503:
        error = reply.json()
    else:
        *_, last, done, end = reply.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))
    assert error["error"]["code"] == "queue_full"


@pytest.mark.nightly
def test_no_request_waits_longer_than_the_queue_timeout(
    start: Callable[..., AbstractContextManager[LiveServer]],
) -> None:
    longest = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with start("--max-num-seqs", "1", "--queue-timeout", "1") as live:
        before = live.canary()
        with live.http.stream("POST", "/v1/completions", json=longest) as first:
            lines = first.iter_lines()  # kept alive: the connection closes with it
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            refused = live.http.post("/v1/completions", json={"prompt": "another"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_timeout"
        wait_for(live.is_idle, "pages or requests are left")
        assert live.canary() == before


@pytest.mark.nightly
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
