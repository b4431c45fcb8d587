"""Clients that send invalid requests or disconnect, with real processes."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from radixkv.wire import sampling
from support.breaking_runtime import SLOW
from support.cases import covering
from support.live import LIMIT_S, LiveServer, wait_for

VOCAB_SIZE = 4096
CONTEXT = 8192
COMPLETION = {"prompt": "Hello", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ABOVE_INT64 = 1 << 63

COMMON: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.001, 100.1, "1", True]),
    ("top_p", [0, -0.001, 1.001]),
    ("top_k", [-2, 1 << 31, 1.5]),
    ("min_p", [-0.001, 1.001]),
    ("presence_penalty", [-2.001, 2.001]),
    ("frequency_penalty", [-2.001, 2.001]),
    ("repetition_penalty", [0, sampling.MAX_REPETITION_PENALTY + 0.1]),
    ("logit_bias", [{"-1": 1}, {str(VOCAB_SIZE): 1}, {"1": 100.1}, {"1": -100.1}, {"x": 1}]),
    ("logit_bias", [{str(token): 1 for token in range(sampling.MAX_LOGIT_BIASES + 1)}]),
    ("n", [0, sampling.MAX_CHOICES + 1]),
    ("best_of", [2]),
    ("max_tokens", [-1, CONTEXT, 1.5, "4"]),
    ("min_tokens", [-1, 5]),
    ("seed", [-ABOVE_INT64 - 1, ABOVE_INT64, "x"]),
    ("stop", ["", ["a"] * (sampling.MAX_STOP_STRINGS + 1), "x" * (sampling.MAX_STOP_CHARACTERS + 1), [1]]),
    ("stop_token_ids", [[-1], [VOCAB_SIZE], [1] * (sampling.MAX_STOP_TOKEN_IDS + 1), ["x"]]),
    ("prompt_logprobs", [-1, sampling.MAX_LOGPROBS + 1]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": True}, 1]),
    ("cache_salt", ["x" * 129, 1]),
    ("priority", [-ABOVE_INT64 - 1, ABOVE_INT64, "x", -(1 << 31), 1]),
    ("ignore_eos", [1]),
    ("model", [1, ["tiny"]]),
]
"""Fields of both APIs, with the invalid values closest to the valid ones."""
COMPLETION_ONLY: list[tuple[str, list[Any]]] = [
    ("logprobs", [-1, sampling.MAX_LOGPROBS + 1, True]),
    ("prompt", [None, [], [[]], 5, [-1], [VOCAB_SIZE], [1 << 31], [1, "x"], ["x"] * 65, "x " * CONTEXT]),
    ("prompt", [[1] * CONTEXT]),
    ("echo", [1]),
    ("suffix", ["x"]),
]
CHAT_ONLY: list[tuple[str, list[Any]]] = [
    ("logprobs", [1]),
    ("top_logprobs", [-1, sampling.MAX_LOGPROBS + 1, 1]),
    ("max_completion_tokens", [-1, CONTEXT]),
    ("messages", [None, [], "x", [1], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}]]),
    ("messages", [[{"role": "user", "content": 5}], [{"role": "user", "content": "x " * CONTEXT}]]),
    ("tools", [[{"type": "function"}]]),
    ("response_format", [{"type": "json_schema"}, {"type": "xml"}]),
]
MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stop": "\\udfff"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"unknown": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "prompt": "x"}',
]


def check_refusal(live: LiveServer, path: str, content: bytes, **headers: str) -> dict[str, Any]:
    """Sends an invalid request and returns its error, after checks of its form."""
    reply = live.http.post(path, content=content, headers={"Content-Type": "application/json", **headers})
    assert reply.status_code == 400, (content[:200], reply.text)
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 300
    return error


@pytest.mark.parametrize(
    ("path", "body", "cases"),
    [("/v1/completions", COMPLETION, COMMON + COMPLETION_ONLY), ("/v1/chat/completions", CHAT, COMMON + CHAT_ONLY)],
    ids=["completions", "chat"],
)
def test_the_closest_invalid_values_are_refused(
    checked_server: LiveServer, path: str, body: dict[str, Any], cases: list[tuple[str, list[Any]]]
) -> None:
    for param, values in cases:
        for value in values:
            error = check_refusal(checked_server, path, json.dumps({**body, param: value}).encode())
            assert error["param"] == param, (value, error)


def test_malformed_bodies_are_refused(checked_server: LiveServer) -> None:
    for content in MALFORMED:
        for path in ("/v1/completions", "/v1/chat/completions"):
            check_refusal(checked_server, path, content)


def test_a_body_that_is_too_large_is_refused(checked_server: LiveServer) -> None:
    """It is refused by its Content-Length, or once too much has arrived while the client still sends."""
    size = (8 << 20) + 1
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for rest in (b"Content-Length: %d\r\n\r\n" % size, b"Transfer-Encoding: chunked\r\n\r\n" + chunks * 129):
        with socket.create_connection(("127.0.0.1", checked_server.port), timeout=LIMIT_S) as connection:
            connection.sendall(head + rest)
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def send_request(live: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns its connection, from which nothing has been read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize(
    ("streams", "kind"),
    covering([True, False], ["decoding", "several choices", "queued", "in the middle of a prompt"]),
)
def test_a_disconnect_frees_pages_in_every_state(checked_server: LiveServer, kind: str, streams: bool) -> None:
    body, n_running, n_waiting, max_steps = {
        "decoding": ({"prompt": ["one", "two"]}, 2, 0, 2000),
        "several choices": ({"prompt": "one", "n": 4, "seed": 1}, 4, 0, 2000),
        "queued": ({"prompt": [f"{i} hello" for i in range(30)]}, 16, 14, 2000),
        "in the middle of a prompt": ({"prompt": [*SLOW, *[5] * 126] * 40}, 1, 0, 20),
    }[kind]
    n_before = checked_server.metric("steps_total")
    with send_request(checked_server, {**body, "max_tokens": 2000, "ignore_eos": True, "stream": streams}):
        wait_for(lambda: checked_server.metric("num_requests_running") == n_running, "it never ran")
        wait_for(lambda: checked_server.metric("num_requests_waiting") == n_waiting, "it never waited")
        if kind != "in the middle of a prompt":
            n_steps = checked_server.metric("steps_total")
            wait_for(lambda: checked_server.metric("steps_total") > n_steps, "no step")
    wait_for(checked_server.is_idle, "pages are still held")
    assert checked_server.metric("steps_total") - n_before < max_steps, "it was not cancelled"


def test_a_disconnect_during_an_upload_leaves_nothing(checked_server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for part in (b"", b"POST", head, head + b"Content-Length: 100\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", checked_server.port), timeout=LIMIT_S) as connection:
            connection.sendall(part)


def test_a_reader_that_pauses_gets_the_whole_answer(checked_server: LiveServer) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 80, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    whole = checked_server.complete(**body)
    n_before = checked_server.metric("generation_tokens_total")
    with send_request(checked_server, {**body, "stream": True}) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: checked_server.metric("generation_tokens_total") == n_before + 160, "it never ran")
        wait_for(lambda: checked_server.metric("num_requests_running") == 0, "it is still running")
        received = b""
        while b"data: [DONE]" not in received:
            part = connection.recv(65536)
            assert part, "the stream ended without its end"
            received += part
    texts = {0: "", 1: ""}
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    assert [texts[0], texts[1]] == [choice["text"] for choice in whole["choices"]]
