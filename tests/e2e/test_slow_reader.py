"""A client that requests a long stream and stops reading, with real processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.live import LIMIT_S, LiveServer, wait_for

N_CHOICES = 15
N_TOKENS = 4000
"""Tokens per choice: a hundred megabytes of chunks in all, of which the server buffers a few."""
LONG_STREAM = {
    "prompt": [7] * 1000,
    "echo": True,
    # The first chunk, with the log-probabilities of the prompt, fills the kernel's buffers.
    "n": N_CHOICES,
    "seed": 1,
    "logprobs": 20,
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


@pytest.mark.nightly
def test_a_stalled_reader_is_ended(checked_server: LiveServer) -> None:
    """Its pages are freed while it is still connected; the error is at the end of its stream."""
    n_before = checked_server.metric("generation_tokens_total")
    with stalled(checked_server) as connection:
        wait_for(lambda: checked_server.metric("generation_tokens_total") >= n_before + N_CHOICES, "it never ran")
        wait_for(checked_server.is_idle, "it is still running", 3 * LIMIT_S)  # it generates megabytes
        n_generated = checked_server.metric("generation_tokens_total") - n_before
        assert n_generated < N_CHOICES * N_TOKENS / 2, "it was not ended"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    *chunks, last = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert chunks
    assert last["error"]["code"] == "client_too_slow", last


@pytest.mark.nightly
def test_a_stalled_reader_delays_no_other_client(checked_server: LiveServer) -> None:
    """A slow reader delays nobody, and leaves nothing when it disconnects while the server waits for it."""
    canary = checked_server.canary()
    n_before = checked_server.metric("generation_tokens_total")
    with stalled(checked_server):
        wait_for(lambda: checked_server.metric("generation_tokens_total") >= n_before + N_CHOICES, "it never ran")
        for _ in range(3):
            assert checked_server.canary() == canary


@contextmanager
def stalled(live: LiveServer) -> Iterator[socket.socket]:
    """Opens a connection that has requested the stream, has small buffers and has read only the head."""
    with socket.socket() as connection:
        connection.settimeout(LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before the TCP window is negotiated
        connection.connect(("127.0.0.1", live.port))
        content = json.dumps(LONG_STREAM).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        yield connection
