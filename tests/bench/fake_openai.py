"""A small OpenAI-compatible server with an infinite cache, and with faults on request."""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that leave."""

    def handle_error(self, request, client_address):
        pass


class FakeServer:
    """Tokens of a prompt are its bytes. Settings may be changed between runs."""

    def __init__(self):
        self.returns_ids = True
        self.reports_cached = True
        self.has_flush = True
        self.fault = None
        """``http_500``, ``no_done``, ``error_event``, ``no_usage``, ``not_json``, ``cut``: if "FAULT" is asked."""
        self.odd_bytes = False
        """Whether the stream comes in CRLF lines, comments and pieces that split characters."""
        self.ends_apart = True
        """Whether the reason of the end comes after the last token, in an event of its own."""
        self.empty_events = 0
        """How many events without text and tokens come before each one that has them."""
        self.delay = 0.0
        self.key = None
        """What requests must show, if anything."""
        self.bodies = []
        self.flushes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.seen = []
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                if not self.may_enter():
                    return self.reply(401, {"error": {"message": "no key"}})
                if self.path == "/v1/models":
                    return self.reply(200, {"object": "list", "data": [{"id": "fake-model"}]})
                return self.reply(404, {"error": {"message": "no such path"}})

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if not self.may_enter():
                    return self.reply(401, {"error": {"message": "no key"}})
                if self.path == "/flush_cache" and fake.has_flush:
                    fake.flushes += 1
                    fake.seen = []
                    return self.reply(200, {})
                if self.path == "/v1/completions":
                    return fake.complete(self, json.loads(body))
                return self.reply(404, {"error": {"message": "no such path"}})

            def may_enter(self):
                return fake.key is None or self.headers.get("authorization") == f"Bearer {fake.key}"

            def reply(self, status, value):
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def piece(self, text):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
                self.wfile.flush()

            def log_message(self, *_):
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def complete(self, handler, body):
        with self.lock:
            self.bodies.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            prompt = list(body["prompt"].encode())
            cached = max((common(prompt, other) for other in self.seen), default=0)
            cached = min(cached, len(prompt) - 1)
            self.seen.append(prompt)
        try:
            self.stream(handler, body, prompt, cached)
        finally:
            with self.lock:
                self.in_flight -= 1

    def stream(self, handler, body, prompt, cached):
        fault = self.fault if "FAULT" in body["prompt"] else None
        if fault == "http_500":
            return handler.reply(500, {"error": {"message": "it broke"}})
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        ids = output_ids(body["prompt"], body["max_tokens"])
        for place, token in enumerate(ids):
            choice = {"index": 0, "text": output_text(token)}
            if self.returns_ids:
                choice["token_ids"] = [token]
                if place == 0:
                    choice["prompt_token_ids"] = prompt
            if not self.ends_apart and place == len(ids) - 1:
                choice["finish_reason"] = "length"
            for _ in range(self.empty_events):
                self.event(handler, {"choices": [{"index": 0, "text": "", "token_ids": []}]})
            self.event(handler, {"choices": [choice], "usage": None})
            time.sleep(self.delay)
            if fault == "error_event":
                self.event(handler, {"error": {"message": "the runtime died"}})
            if fault == "not_json":
                handler.piece(b"data: {oops\n\n")
            if fault == "cut":
                handler.close_connection = True
                return None
        if self.ends_apart:
            self.event(handler, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if fault != "no_usage":
            self.event(handler, {"choices": [], "usage": usage})
        self.event(handler, {"choices": [], "usage": None})
        if fault != "no_done":
            handler.piece(b"data: [DONE]\n\n")
        handler.piece(b"")
        return None

    def event(self, handler, value):
        text = json.dumps(value, ensure_ascii=False).encode()
        if not self.odd_bytes:
            return handler.piece(b"data: " + text + b"\n\n")
        text = b": a comment\r\nevent: message\r\ndata:" + text + b"\r\n\r\n"
        for start in range(0, len(text), 7):
            handler.piece(text[start : start + 7])
        return None


def output_ids(prompt, count):
    digest = hashlib.sha256(prompt.encode()).digest()
    return [digest[place % 32] for place in range(count)]


def output_text(token):
    return "\u2028é" if token % 2 else f" {token}"


def common(one, other):
    """How many tokens two prompts begin with together."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
