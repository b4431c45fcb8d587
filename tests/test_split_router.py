"""The router of deploy/split between a client and two servers that are played here."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from support.paths import ROOT

LIMIT_S = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def load_router() -> Any:
    spec = importlib.util.spec_from_file_location("split_router", ROOT / "deploy" / "split" / "router.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


router = load_router()


class Upstream(ThreadingHTTPServer):
    """A server that answers at once, or begins to and waits until nobody reads."""

    daemon_threads = True

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.begun = threading.Event()
        self.left = threading.Event()
        self.hangs = ""
        """``before`` the headers or ``within`` the body; empty: it answers."""
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/cache/match":
            self.reply({"prompts": [{"prompt_tokens": 2000, "matched_tokens": {"device": 0}}]})
            return
        self.server.seen.append((self.path, body))
        if not self.server.hangs:
            self.reply({"ok": len(body)})
            return
        if self.server.hangs == "within":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n")
        self.server.begun.set()
        self.connection.settimeout(LIMIT_S)
        if not self.connection.recv(1):
            self.server.left.set()

    def reply(self, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


class Site:
    """The router with its two servers."""

    def __init__(self, prefill: Upstream, decode: Upstream, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Sends bytes; returns the status and the rest of the reply."""
        with closing(self.connect()) as client:
            client.sendall(sent)
            with client.makefile("rb") as reply:
                status, _, rest = reply.read().partition(b"\r\n")
        return int(status.split()[1]), rest

    def post(self, path: str, fields: dict[str, Any]) -> tuple[int, bytes]:
        return self.ask(request(path, json.dumps(fields).encode()))


def request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=LIMIT_S)


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Upstream()) as prefill, serving(Upstream()) as decode:
        names = [f"127.0.0.1:{one.server_port}" for one in (prefill, decode)]
        with serving(router.Server(("127.0.0.1", 0), *names, 512)) as server:
            yield Site(prefill, decode, server.server_port)


@pytest.mark.parametrize(("hangs", "read"), [("before", b""), ("within", b"abcde")])
def test_a_client_that_leaves_ends_its_request_at_the_decode_server(site: Site, hangs: str, read: bytes) -> None:
    site.decode.hangs = hangs
    with closing(site.connect()) as client:
        client.sendall(request("/v1/completions", b"{}"))
        assert site.decode.begun.wait(LIMIT_S)
        received = b""
        while not received.endswith(read):
            received += client.recv(100)
    assert site.decode.left.wait(LIMIT_S)


def test_a_client_that_leaves_ends_its_request_at_the_prefill_server(site: Site) -> None:
    site.prefill.hangs = "before"
    with closing(site.connect()) as client:
        client.sendall(request("/v1/completions", b"{}"))
        assert site.prefill.begun.wait(LIMIT_S)
    assert site.prefill.left.wait(LIMIT_S)
    assert not site.decode.seen


def test_a_client_that_does_not_send_all_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.Router, "timeout", 0.05)
    with closing(site.connect()) as client:
        client.sendall(b"POST /v1/comp")
        assert client.recv(100) == b""
    assert site.ask(POST + b"Content-Length: 100\r\n\r\n{")[0] == 408
    assert not site.decode.seen


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/unload_lora_adapter?a=b"])
def test_adapters_are_not_loaded_in_one_server_of_two(site: Site, path: str) -> None:
    status, text = site.post(path, {"lora_name": "sql", "lora_path": "sql"})
    assert (status, b"--lora-modules" in text) == (400, True)
    assert site.prefill.seen == site.decode.seen == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + b"Content-Length: abc\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: \xb2\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999\r\n\r\n", 413),
        (POST + b"\r\n", 411),
        ("GET /v1/\u00e9 HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400),
        (b"GET /v1/\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (request("/v1/completions", b"[" * 200_000), 200),
        (request("/v1/completions", b"\xff"), 200),
    ],
)
def test_bad_requests_get_a_reply(site: Site, sent: bytes, status: int) -> None:
    """The decode server judges bodies."""
    assert site.ask(sent)[0] == status


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8001",
        "https://a:1",
        "http://a:1/prefix",
        "http://a:1?b",
        "http://u@a:1",
        "http://a:b",
        "nonsense",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ArgumentTypeError, match="http://HOST:PORT"):
        router.address(url)


def test_urls_that_are_taken() -> None:
    taken = [router.address(url) for url in ("http://127.0.0.1:8001", "http://a-b.c/", "http://[::1]:80")]
    assert taken == ["127.0.0.1:8001", "a-b.c", "[::1]:80"]


LONG = "x" * 9000


@pytest.mark.parametrize(
    ("path", "fields", "is_split"),
    [
        ("/v1/completions", {"logprobs": 1}, True),
        ("/v1/completions", {"echo": True}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/chat/completions", {"prompt_logprobs": 0}, False),
        ("/v1/chat/completions", {"logprobs": False, "echo": True}, True),
        ("/v1/completions", {"skip_reading_prefix_cache": True}, False),
        ("/generate", {"text": LONG, "skip_reading_prefix_cache": True}, False),
        ("/generate", {"text": LONG, "return_logprob": True}, True),
        ("/generate", {"text": LONG, "return_logprob": True, "logprob_start_len": 0}, False),
        ("/generate", {"text": LONG, "return_logprob": [True], "logprob_start_len": [-1, 5]}, False),
        ("/v1/models", {"text": LONG}, False),
    ],
)
def test_what_the_decode_server_computes_anyway_is_not_split(
    site: Site, path: str, fields: dict[str, Any], is_split: bool
) -> None:
    assert site.post(path, fields)[0] == 200
    assert len(site.prefill.seen) == is_split
    assert site.decode.seen == [(path, json.dumps(fields).encode())]


def test_what_demands_an_answer_of_messages_stays_with_the_decode_server(site: Site) -> None:
    """Messages refuse it beside ``max_tokens`` 0."""
    prompt = {"messages": [{"role": "user", "content": LONG}], "tools": [{"name": "f"}]}
    fields = {
        **prompt,
        "max_tokens": 2000,
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "any"},
        "output_config": {"effort": "low", "format": {"type": "json_schema"}},
        "diagnostics": {"previous_message_id": "msg_1"},
    }
    assert site.post("/v1/messages", fields)[0] == 200
    ((_, asked),) = site.prefill.seen
    rest = {"max_tokens": 0, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    assert json.loads(asked) == prompt | rest
