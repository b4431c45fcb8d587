"""A client that asks for a long stream and stops reading, on real processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from support.live import LIMIT_S, Live, wait_for

N_CHOICES = 8
N_TOKENS = 6000
"""Of each choice: a hundred megabytes of chunks, of which the server keeps a few."""
LONG_STREAM = {
    "prompt": [7] * 1000,
    "echo": True,
    # The first chunk, with how likely all of the prompt was, fills what the kernel keeps.
    "n": N_CHOICES,
    "seed": 1,
    "logprobs": 20,
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


def test_a_client_that_stops_reading_is_cut(unharmed: Live) -> None:
    """Its pages come back while it is still connected; if it then reads, it finds the reason at the end."""
    n_before = unharmed.metric("generation_tokens_total")
    with stalled(unharmed) as connection:
        wait_for(lambda: unharmed.metric("generation_tokens_total") >= n_before + N_CHOICES, "it never ran")
        wait_for(unharmed.is_idle, "it runs on", 3 * LIMIT_S)  # megabytes have to be made
        assert unharmed.metric("generation_tokens_total") - n_before < N_CHOICES * N_TOKENS / 2, "it was not cut"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    *chunks, last = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert chunks
    assert last["error"]["code"] == "client_too_slow", last


def test_others_are_served_beside_it(unharmed: Live) -> None:
    """A slow reader holds up nobody, and one that hangs up while the server waits for it leaves nothing."""
    canary = unharmed.canary()
    n_before = unharmed.metric("generation_tokens_total")
    with stalled(unharmed):
        wait_for(lambda: unharmed.metric("generation_tokens_total") >= n_before + N_CHOICES, "it never ran")
        for _ in range(3):
            assert unharmed.canary() == canary


@contextmanager
def stalled(live: Live) -> Iterator[socket.socket]:
    """A connection that asked for the stream, has room for a few kilobytes, and read its head only."""
    with socket.socket() as connection:
        connection.settimeout(LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before the window is agreed on
        connection.connect(("127.0.0.1", live.port))
        content = json.dumps(LONG_STREAM).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        yield connection
