"""Streams at the level of bytes: framing, slow readers and disconnects."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.wire.messages import FromRuntime
from support.live import LIMIT_S, wait_for
from support.running_site import running_site
from support.scripted_runtime import Site

COMPARED_FIELDS = ("text", "token_ids", "tokens", "token_logprobs", "text_offset", "top_logprobs")


@contextmanager
def open_stream(
    site: Site, version: str = "1.1", receive_bytes: int = 1 << 20, **body: Any
) -> Iterator[socket.socket]:
    """Opens a connection and sends a request for a stream."""
    content = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.settimeout(LIMIT_S)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes
        )  # before the TCP window is negotiated
        connection.connect(("127.0.0.1", site.port))
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


@pytest.fixture
def turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Limits the runtime to the released turns; each gives a token to every choice."""
    turns, turn = threading.Semaphore(0), site.loop.turn

    def allowed() -> list[FromRuntime]:
        assert turns.acquire(timeout=LIMIT_S)
        return turn()

    monkeypatch.setattr(site.loop, "turn", allowed)
    return turns


def read(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        part = connection.recv(1 << 16)
        assert part, received
        received += part
    return received


def events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]


def concatenated(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates the fields of a choice over its chunks; a whole response has one."""
    fields = [choice | (choice["logprobs"] or {}) for choice in choices]
    return {name: reduce(add, [each[name] for each in fields]) for name in COMPARED_FIELDS}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_fast_reader_gets_each_token_separately(site: Site, turns: threading.Semaphore, path: str) -> None:
    messages = [{"role": "user", "content": "ab"}]
    prompt_fields = {"prompt": "ab"} if path == "/v1/completions" else {"messages": messages}
    body = {"max_tokens": 8, "stream": True, "return_token_ids": True, **prompt_fields}
    n_ids = []
    turns.release()
    with site.http.stream("POST", path, json=body) as reply:
        for line in filter(None, reply.iter_lines()):
            if line == "data: [DONE]":
                break
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            if "token_ids" in choice:
                n_ids.append(len(choice["token_ids"]))
                turns.release()
    assert n_ids == [1] * 8


def test_tokens_that_arrive_during_a_pause_come_together_in_order(site: Site, turns: threading.Semaphore) -> None:
    body: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 20, "n": 2, "logprobs": 3, "return_token_ids": True}

    def pause() -> None:
        turns.release(100)
        wait_for(lambda: not site.loop.running, "still running")
        time.sleep(0.5)  # blocks the loop only: the sending and receiving threads continue

    turns.release(3)
    with open_stream(site, **body) as connection:
        first_bytes = connection.recv(1 << 16)
        site.events.call_soon_threadsafe(pause)
        stream = first_bytes + read(connection, b"0\r\n\r\n")
    whole = site.http.post("/v1/completions", json=body).json()["choices"]
    for index in (0, 1):
        chunks = [event["choices"][0] for event in events(stream)]
        chunks = [choice for choice in chunks if choice["index"] == index]
        assert concatenated(chunks) == concatenated([whole[index]])
        assert [choice["finish_reason"] for choice in chunks if choice["finish_reason"]] == ["length"]
        assert max(len(choice["token_ids"]) for choice in chunks) > 10


def test_a_stalled_reader_gets_an_error_event(served_model: ServedModel, tmp_path: Path) -> None:
    prompt_fields = {"prompt": ["abcdefgh"] * 8, "n": 8, "logprobs": 20, "max_tokens": 500}
    with (
        running_site(served_model, tmp_path, max_pending_bytes=50_000) as site,
        open_stream(site, receive_bytes=4096, **prompt_fields) as connection,
    ):
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        wait_for(lambda: not site.loop.running, "still running")
        stream = read(connection, b"0\r\n\r\n")
    *chunks, last = events(stream)
    assert last["error"]["code"] == "client_too_slow"
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    assert stream.endswith(b"\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_parts_are_framed_for_the_http_version(site: Site, version: str) -> None:
    with open_stream(site, version, prompt="ab", max_tokens=3) as connection:
        stream = read(connection, b"0\r\n\r\n" if version == "1.1" else b"[DONE]\n\n")
        if version == "1.0":
            assert connection.recv(1) == b""
    head, _, rest = stream.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    body = b""
    while version == "1.1" and rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    lines = (body or rest).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]) == "aba"
