"""A small router that has long prompts computed by one server, and their answers decoded by another one.

Usage: python deploy/split/router.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8000

Both servers use the same shared store (--cache-url). A request whose prompt the decode server lacks goes to the
prefill server first, with nothing to generate; its reply comes once the store has the prompt. If that fails, the
decode server computes the prompt itself. It needs nothing but Python: a thread for each request in flight.
Servers and clients speak HTTP with it, not HTTPS.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import select
import socket
import sys
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

MAX_BODY_BYTES = 8 << 20
BYTES_PER_TOKEN = 4
"""Of a body of which /cache/match cannot count the tokens."""
COMPUTE_LIMIT_S, MATCH_LIMIT_S, SILENCE_LIMIT_S = 120.0, 5.0, 600.0
CLIENT_LIMIT_S = 60.0
"""How long a client may send nothing of a request that it has begun, or read nothing of its reply."""
HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding", "te", "upgrade"})
ADAPTER_PATHS = frozenset(
    f"{beginning}/{verb}_lora_adapter" for beginning in ("", "/v1") for verb in ("load", "unload")
)
"""Paths that change one server; the other one would not know the adapter, or still have it."""
OUTPUT_FIELDS = ("stream", "stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs")


def for_the_cache(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the request that only computes the prompt of another one.

    None for a path without prompts, and where the decode server computes the prompt in any case.
    """
    if is_computed_anyway(path, body):
        return None
    rest = {name: value for name, value in body.items() if name not in OUTPUT_FIELDS}
    match path:
        case "/v1/completions" | "/v1/chat/completions":
            return {**rest, "echo": False, "max_tokens": 0}
        case "/v1/messages":
            return {**prompt_of_messages(rest), "max_tokens": 0}
        case "/v1/responses":
            return {**rest, "prompt_cache_options": {"prewarm": True, "mode": "explicit"}}
        case "/generate":
            return {**rest, "sampling_params": {"max_new_tokens": 0}, "return_logprob": False}
    return None


def is_computed_anyway(path: str, body: dict[str, Any]) -> bool:
    """Returns whether a request reads no cached prompt: by its own wish, or for logprobs of the prompt."""
    if body.get("skip_reading_prefix_cache"):
        return True
    if path == "/generate":
        starts = body.get("logprob_start_len", -1)
        starts = starts if isinstance(starts, list) else [starts]
        return bool(body.get("return_logprob")) and any(isinstance(start, int) and start >= 0 for start in starts)
    has_logprobs = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 asks for the token's own
    return body.get("prompt_logprobs") is not None or (bool(body.get("echo")) and has_logprobs)


def prompt_of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what demands an answer, which ``max_tokens`` 0 refuses; the prompt is the same without it."""
    rest = {name: value for name, value in body.items() if name not in ("tool_choice", "diagnostics")}
    if isinstance(config := rest.get("output_config"), dict):
        rest["output_config"] = {name: value for name, value in config.items() if name != "format"}
    thinking = rest.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        rest["thinking"] = {"type": "adaptive"}
    return rest


def address(url: str) -> str:
    """Returns host and port of a server's URL. Raises ``ArgumentTypeError``."""
    if not re.fullmatch(r"http://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?", url, re.ASCII):
        raise argparse.ArgumentTypeError(f"{url!r} is not http://HOST:PORT, without a path; HTTPS is not spoken")
    return urlsplit(url).netloc


def has_more(reply: http.client.HTTPResponse, upstream: socket.socket) -> bool:
    """Returns whether a part of a reply, or its end, has come that is not read yet."""
    if reply.isclosed() or reply.length == 0:
        return True
    limit_s = upstream.gettimeout()
    upstream.settimeout(0.0)
    try:
        n_known = 2 if reply.chunked and reply.chunk_left == 0 else 0  # the line end of a chunk that was read
        return len(reply.fp.peek(1)) > n_known
    finally:
        upstream.settimeout(limit_s)


class ClientLeftError(Exception):
    """Nobody waits for the reply any more."""


class Router(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    timeout = CLIENT_LIMIT_S

    def do_POST(self) -> None:
        """Has the prompt computed if that is worth it, then answers as the decode server does."""
        length = self.headers.get("Content-Length") or "0"
        if not re.fullmatch(r"\d{1,18}", length, re.ASCII):
            self.send_error(400, "Content-Length is no number of bytes")
            return
        n_bytes = int(length)
        if not 0 < n_bytes <= MAX_BODY_BYTES:
            self.send_error(413 if n_bytes else 411)
            return
        try:
            body = self.rfile.read(n_bytes)
        except TimeoutError:
            self.send_error(408, "the body does not come")
            return
        if len(body) == n_bytes:
            self.answer(body)

    def do_GET(self) -> None:
        """Answers as the decode server does."""
        self.answer(None)

    def answer(self, body: bytes | None) -> None:
        """Answers a request, unless its client leaves."""
        if not re.fullmatch(r"[!-~]+", self.path):
            self.send_error(400, "the path has characters that are not ASCII")
            return
        if self.path.partition("?")[0] in ADAPTER_PATHS:
            self.send_error(
                400, "adapters are loaded in both servers, not here: ask each, or give both --lora-modules"
            )
            return
        try:
            if body is not None:
                self.compute_first(body)
            self.forward(body)
        except ClientLeftError:
            self.log_message("the client has left")

    def compute_first(self, body: bytes) -> None:
        """Has the other server compute the prompt, and waits until the store has it."""
        path = self.path.partition("?")[0]
        try:
            fields = json.loads(body)
            question = for_the_cache(path, fields) if isinstance(fields, dict) else None
            if question is None or self.n_missing(path, body) < self.server.min_tokens:
                return
            status, reply = self.ask(self.server.prefill, self.path, json.dumps(question).encode(), COMPUTE_LIMIT_S)
            if status != 200:
                self.log_message("the prompt is not computed ahead: %s", reply[:300].decode(errors="replace"))
        # The decode server computes it, or says what is wrong with the request.
        except (OSError, ValueError, LookupError, RecursionError, http.client.HTTPException) as error:
            self.log_message("the prompt is not computed ahead: %r", error)

    def n_missing(self, path: str, body: bytes) -> float:
        """Returns how many tokens of the prompts the decode server would have to compute."""
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return len(body) / BYTES_PER_TOKEN
        status, reply = self.ask(self.server.decode, "/cache/match", body, MATCH_LIMIT_S)
        prompts = json.loads(reply)["prompts"] if status == 200 else []  # it refuses the request itself, too
        return float(sum(one["prompt_tokens"] - sum(one["matched_tokens"].values()) for one in prompts))

    def ask(self, server: str, path: str, body: bytes, limit_s: float) -> tuple[int, bytes]:
        """Posts a body; returns status and body of the reply."""
        with closing(http.client.HTTPConnection(server, timeout=limit_s)) as connection:
            reply, _ = self.begin(connection, "POST", path, body)
            with reply:
                return reply.status, reply.read()

    def forward(self, body: bytes | None) -> None:
        """Passes the decode server's reply on as it comes."""
        with closing(http.client.HTTPConnection(self.server.decode, timeout=SILENCE_LIMIT_S)) as connection:
            try:
                reply, upstream = self.begin(connection, self.command, self.path, body)
            except (OSError, http.client.HTTPException) as error:
                self.send_error(502, f"the decode server does not answer: {error}")
                return
            with reply:
                self.send_response_only(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                while part := reply.read1(1 << 16):
                    self.wfile.write(part)
                    if not has_more(reply, upstream):
                        self.wait_for(upstream)

    def begin(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Sends a request with the headers of the client, its key and host among them.

        Returns the reply, of which the headers have come, and its socket.
        """
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        connection.request(method, path, body, {**headers, "Connection": "close"})
        upstream = connection.sock
        self.wait_for(upstream)
        return connection.getresponse(), upstream

    def wait_for(self, upstream: socket.socket) -> None:
        """Waits until a server has sent something, or closed the connection.

        Raises:
            ClientLeftError: the client has closed its side meanwhile. Closing the server's ends the request.
            TimeoutError: nothing comes for the timeout of ``upstream``.
        """
        events = select.poll()
        events.register(upstream, select.POLLIN)
        events.register(self.connection, select.POLLIN)
        while upstream.fileno() not in (ready := dict(events.poll(1000 * upstream.gettimeout()))):
            if not ready:
                raise TimeoutError("nothing comes")
            try:
                is_open = self.connection.recv(1, socket.MSG_PEEK)
            except OSError:
                is_open = b""
            if not is_open:
                raise ClientLeftError
            events.unregister(self.connection)  # it sends what nobody reads


class Server(ThreadingHTTPServer):
    """Routes requests to two servers. Ends with its main thread, whatever is in flight.

    Args:
        address: where it listens.
        prefill: host and port of the server that computes prompts.
        decode: host and port of the server that decodes answers.
        min_tokens: prompts of which the latter lacks fewer are not split.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], prefill: str, decode: str, min_tokens: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.min_tokens = min_tokens
        super().__init__(address, Router)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says in a line what has gone wrong."""
        print(f"a reply is cut off: {sys.exc_info()[1]!r}", file=sys.stderr, flush=True)


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prefill", required=True, type=address, metavar="URL", help="the server that computes prompts"
    )
    parser.add_argument(
        "--decode", required=True, type=address, metavar="URL", help="the server that decodes answers"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--min-tokens", type=int, default=512, help="prompts that lack fewer are not split (default: 512)"
    )
    args = parser.parse_args()
    with Server((args.host, args.port), args.prefill, args.decode, args.min_tokens) as server:
        print(f"ready on http://{args.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
