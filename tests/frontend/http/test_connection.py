"""Connections with incomplete requests or with bytes that are not HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from radixkv.frontend.http.connection import HALF_CLOSED_CHECK_S, Connection
from radixkv.frontend.served_model import ServedModel
from support.live import LIMIT_S, wait_for
from support.running_site import running_site, site_fixture
from support.scripted_runtime import Site
from support.site_requests import COMPLETIONS_HEAD, until_closed

SHORT_DEADLINE_S = 1.0
"""Deadline for requests that stall."""
LONG_DEADLINE_S = 4.0
"""Deadline for requests that are complete, on a busy machine."""


def completion(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"prompt": "ab", "max_tokens": 3, **fields}).encode()
    return COMPLETIONS_HEAD.replace(b"1.1", version.encode()) + b"Content-Length: %d\r\n\r\n" % len(body) + body


WHOLE, STREAM = completion(), completion(stream=True)
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMUGGLING = (
    COMPLETIONS_HEAD
    + f"Content-Length: {5 + len(SMUGGLED)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    + SMUGGLED
)
"""A request with two lengths: by the second one, another request follows."""


class ShortDeadline(Connection):
    limit_s = SHORT_DEADLINE_S


class LongDeadline(Connection):
    limit_s = LONG_DEADLINE_S


class TimeIsOver(Connection):
    """A connection whose keep-alive timeout runs after each response, before the next request is read."""

    is_over, is_sent = threading.Event(), threading.Event()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_soon(self._continue)

    def _continue(self) -> None:
        self.is_over.set()
        assert self.is_sent.wait(LIMIT_S)
        self.timeout_keep_alive_handler()


short_deadline = site_fixture(connection=ShortDeadline)


long_deadline = site_fixture(connection=LongDeadline)


def connect(site: Site) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S)


@pytest.mark.parametrize("sent", [b"", b"P", COMPLETIONS_HEAD, COMPLETIONS_HEAD + b"Content-Length: 5\r\n"])
def test_a_head_that_stalls_ends_the_connection(short_deadline: Site, sent: bytes) -> None:
    with connect(short_deadline) as connection:
        connection.sendall(sent)
        assert until_closed(connection) == b""


@pytest.mark.parametrize(
    ("begun", "rest"),
    [(b"", WHOLE), (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", b"x" * 100)],
    ids=["head", "body that nobody reads"],
)
def test_sending_byte_by_byte_does_not_extend_the_deadline(short_deadline: Site, begun: bytes, rest: bytes) -> None:
    with connect(short_deadline) as connection:
        connection.sendall(begun)
        connection.settimeout(0.05)
        # The connection is reset instead of closed if another byte has come that the server had not read.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for i in range(len(rest)):
                connection.sendall(rest[i : i + 1])
                with contextlib.suppress(TimeoutError):
                    if connection.recv(4096) == b"":
                        return
            pytest.fail("the connection is still open")


def test_the_deadline_does_not_cover_the_response(short_deadline: Site) -> None:
    short_deadline.loop.step_s = SHORT_DEADLINE_S / 2  # three times
    try:
        with connect(short_deadline) as connection:
            connection.sendall(WHOLE.replace(b"Host", b"Connection: close\r\nHost"))
            assert b'"text":"aba"' in until_closed(connection)
    finally:
        short_deadline.loop.step_s = 0.0


def test_an_idle_connection_reads_a_last_time_before_it_is_closed(
    served_model: ServedModel, tmp_path: Path
) -> None:
    with running_site(served_model, tmp_path, connection=TimeIsOver) as site, connect(site) as connection:
        connection.sendall(WHOLE)
        assert TimeIsOver.is_over.wait(LIMIT_S)
        connection.sendall(WHOLE)
        TimeIsOver.is_sent.set()
        assert until_closed(connection).count(b"HTTP/1.1 200 ") == 2


def test_each_request_on_a_connection_has_its_own_deadline(long_deadline: Site) -> None:
    with connect(long_deadline) as connection:
        for _ in range(4):
            connection.sendall(WHOLE[:40])
            time.sleep(LONG_DEADLINE_S / 3)
            connection.sendall(WHOLE[40:])
            reply = b""
            while b"}]" not in reply and b'"usage"' not in reply:
                reply += connection.recv(4096)
            assert reply.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        COMPLETIONS_HEAD + b"Content-Length: -5\r\n\r\n",
        COMPLETIONS_HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        COMPLETIONS_HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 66_000,
        COMPLETIONS_HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        COMPLETIONS_HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\nzz\r\n',
        COMPLETIONS_HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"proXXXX',
        SMUGGLING,
        SMUGGLING.replace(b"POST /v1/completions", b"GET /health"),
    ],
    ids=lambda sent: repr(sent[:20] + sent[-20:]),
)
def test_bytes_that_are_not_http_get_an_error_object(
    long_deadline: Site, sent: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with connect(long_deadline) as connection:
        connection.sendall(sent)
        reply = until_closed(connection)
    assert reply.split()[1] in (b"400", b"501")
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", "invalid_request")
    assert long_deadline.http.get("/health").status_code == 200
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("request_", "end"), [(WHOLE, b"}"), (STREAM, b"0\r\n\r\n")], ids=["whole", "stream"])
def test_a_client_that_closes_its_side_gets_its_response(site: Site, request_: bytes, end: bytes) -> None:
    site.loop.step_s = 2 * HALF_CLOSED_CHECK_S
    with connect(site) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        interim, _, reply = until_closed(connection).partition(b"\r\n\r\n")
    assert interim.startswith(b"HTTP/1.1 100 ")
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.endswith(end)
    assert not site.loop.cancelled


def test_http_clients_skip_the_interim_response(site: Site) -> None:
    site.loop.step_s = 0.1
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        body = json.dumps({"prompt": "ab", "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.sock.shutdown(socket.SHUT_WR)
        response = connection.getresponse()
        assert json.load(response)["choices"][0]["text"] == "aba"


@pytest.mark.parametrize("is_held", [True, False], ids=["queued", "running"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"version": "1.0"}], ids=["whole", "stream", "HTTP/1.0"])
def test_a_client_that_closes_its_side_and_leaves_is_cancelled(
    site: Site, fields: dict[str, Any], is_held: bool
) -> None:
    site.loop.is_held = is_held
    site.loop.step_s = 0.02
    with connect(site) as connection:
        connection.sendall(completion(max_tokens=400, **fields))
        wait_for(lambda: bool(site.loop.running), "never submitted")
        connection.shutdown(socket.SHUT_WR)
    wait_for(lambda: not site.loop.running, "still running")


@pytest.mark.parametrize("ending", [b"Host", b"Connection: close\r\nHost"], ids=["kept", "closed"])
def test_a_stream_of_one_token_takes_two_writes(served_model: ServedModel, tmp_path: Path, ending: bytes) -> None:
    """The head goes with the first event, which is also the last here and takes the usage along; then the end."""
    transports: list[Mock] = []

    class Recorded(Connection):
        def connection_made(self, transport: Any) -> None:
            transports.append(Mock(wraps=transport))
            super().connection_made(transports[-1])

    sent = completion(max_tokens=1, stream=True, stream_options={"include_usage": True}).replace(b"Host", ending)
    with running_site(served_model, tmp_path, connection=Recorded) as site, connect(site) as connection:
        connection.sendall(sent)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, received
            received += part
    writes = [bytes(call.args[0]) for call in transports[-1].write.call_args_list if call.args[0]]
    assert b"".join(writes) == received
    assert len(writes) == 2
    assert writes[0].startswith(b"HTTP/1.1 200")
    assert writes[0].count(b"data: ") == 2
    assert b'"usage":{' in writes[0]
    assert b"data: [DONE]" in writes[1]
