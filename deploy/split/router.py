"""A small router that has long prompts computed by one server, and their answers decoded by another one.

Usage: python deploy/split/router.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8000

Both servers use the same shared store (--cache-url). A request whose prompt the decoding server lacks goes to the
computing one first, with nothing to generate; its reply comes once the store has the prompt. If that fails, the
decoding server computes the prompt itself. It needs nothing but Python: a thread for each request in flight.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

MAX_BODY_BYTES = 8 << 20
BYTES_PER_TOKEN = 4
"""Of a body of which /cache/match cannot count the tokens."""
COMPUTE_LIMIT_S, MATCH_LIMIT_S, SILENCE_LIMIT_S = 120.0, 5.0, 600.0
HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding", "te", "upgrade"})
OUTPUT_FIELDS = ("stream", "stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs")


def for_the_cache(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the request that only computes the prompt of another one; None for a path without prompts."""
    rest = {name: value for name, value in body.items() if name not in OUTPUT_FIELDS}
    match path:
        case "/v1/completions" | "/v1/chat/completions":
            return {**rest, "echo": False, "max_tokens": 0}
        case "/v1/messages":
            return {**rest, "max_tokens": 0}
        case "/v1/responses":
            return {**rest, "prompt_cache_options": {"prewarm": True, "mode": "explicit"}}
        case "/generate":
            return {**rest, "sampling_params": {"max_new_tokens": 0}, "return_logprob": False}
    return None


class Router(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server

    def do_POST(self) -> None:
        """Has the prompt computed if that is worth it, then answers as the decoding server does."""
        n_bytes = int(self.headers.get("Content-Length") or 0)
        if not 0 < n_bytes <= MAX_BODY_BYTES:
            self.send_error(413 if n_bytes else 411)
            return
        body = self.rfile.read(n_bytes)
        self.compute_first(body)
        self.forward(body)

    def do_GET(self) -> None:
        """Answers as the decoding server does."""
        self.forward(None)

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
        except (OSError, ValueError, http.client.HTTPException) as error:  # the decoding server computes it
            self.log_message("the prompt is not computed ahead: %r", error)

    def n_missing(self, path: str, body: bytes) -> float:
        """Returns how many tokens of the prompts the decoding server would have to compute."""
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return len(body) / BYTES_PER_TOKEN
        status, reply = self.ask(self.server.decode, "/cache/match", body, MATCH_LIMIT_S)
        prompts = json.loads(reply)["prompts"] if status == 200 else []  # it refuses the request itself, too
        return float(sum(one["prompt_tokens"] - sum(one["matched_tokens"].values()) for one in prompts))

    def ask(self, server: str, path: str, body: bytes, limit_s: float) -> tuple[int, bytes]:
        """Posts a body; returns status and body of the reply."""
        connection = self.connect(server, "POST", path, body, limit_s)
        try:
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def forward(self, body: bytes | None) -> None:
        """Passes the decoding server's reply on as it comes."""
        try:
            connection = self.connect(self.server.decode, self.command, self.path, body, SILENCE_LIMIT_S)
            reply = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.send_error(502, f"the decoding server does not answer: {error}")
            return
        try:
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while part := reply.read1(1 << 16):
                self.wfile.write(part)
        finally:  # a client that has gone: the server sees that nobody reads
            connection.close()

    def connect(
        self, server: str, method: str, path: str, body: bytes | None, limit_s: float
    ) -> http.client.HTTPConnection:
        """Sends a request with the headers of the client, its key and host among them."""
        connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=limit_s)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        connection.request(method, path, body, headers)
        return connection


class Server(ThreadingHTTPServer):
    """Routes requests to two servers. Ends with its main thread, whatever is in flight.

    Args:
        address: where it listens.
        prefill: URL of the server that computes prompts.
        decode: URL of the server that decodes answers.
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
    parser.add_argument("--prefill", required=True, metavar="URL", help="the server that computes prompts")
    parser.add_argument("--decode", required=True, metavar="URL", help="the server that decodes answers")
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
