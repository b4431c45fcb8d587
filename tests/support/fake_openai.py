"""A small OpenAI-compatible server with an infinite cache, scripted responses and injectable faults."""

import hashlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.live import LIMIT_S

FLUSH_ENDPOINTS = (("POST", "/flush_cache"),)


class QuietServer(ThreadingHTTPServer):
    """A server that logs no errors of clients that disconnect."""

    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass


class FakeServer:
    """The server; its settings may be changed between runs. Use it as a context manager.

    The tokens of a prompt are its token ids, or the bytes of its text or of the JSON of its messages.
    """

    def __init__(self):
        self.responses = {}
        """Functions from a request's body to its response, by path; they replace what the server would do.

        A response is an object to send as JSON, a list of objects to send as a stream of events, or bytes.
        """
        self.status = 200
        """The status of such responses."""
        self.requests = []
        """Path, body and Authorization header of each request."""
        self.message = None
        """Function from a chat's body to the assistant's message that answers it; None: answers of made tokens.

        The message may have ``reasoning_content``, ``content`` and ``tool_calls``; it is streamed in small pieces.
        """
        self.returns_ids = True
        self.reports_cached = True
        self.flushes_at = FLUSH_ENDPOINTS
        """Methods and paths that empty the cache."""
        self.metrics = None
        """Template of ``/metrics`` with ``{prompt}``, ``{generated}`` and ``{cached}``; None: no metrics."""
        self.fault = None
        """Fault of requests whose prompt contains ``FAULT``.

        ``http_500``, ``http_503``, ``http_429``, ``truncated``, ``error_event``, ``no_usage``, ``null_usage``,
        ``no_output``, ``not_json``, ``cut``, ``cut_early``, ``silent`` (after a token), ``mute``,
        ``bad_prompt_ids`` or ``one_choice`` (for any ``n``).
        """
        self.sends_done = True
        """Whether streams end with ``[DONE]``."""
        self.known_fields = None
        """Fields that a request may have; None: any."""
        self.splits_bytes = False
        """Whether the stream has CRLF lines, comments, and pieces that split characters."""
        self.separate_finish = True
        """Whether ``finish_reason`` is in a separate event after the last token."""
        self.empty_events = 0
        """Number of events without text and tokens before each event with a token."""
        self.delay = 0.0
        """Seconds after each token."""
        self.stall = 0.0
        """Seconds after the first request in which no request is answered."""
        self.min_in_flight = 0
        """Requests are answered once this many have been in flight at the same time."""
        self.dies_at = None
        """Number of the request at which the server goes away; None: never."""
        self.hangs_at = None
        """Number of the first request whose stream starts but stays empty; None: none."""
        self.health = 200
        """The status of ``/health``."""
        self.key = None
        """API key that requests must have; None: none."""
        self.bodies = []
        self.paths = []
        self.flushed = []
        self.counts = {"prompt": 0, "generated": 0, "cached": 0}
        self.in_flight = 0
        self.most_in_flight = 0
        self.seen = []
        self.connections = []
        self.opens_at = None
        self.lock = threading.Condition()
        self.answered = threading.Event()
        self.is_dead = False
        self.ended = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                fake.connections.append(self.connection)
                if fake.is_dead:  # accepted just before
                    self.connection.shutdown(socket.SHUT_RDWR)

            def do_GET(self):
                if self.receive(None):
                    return None
                if self.path == "/v1/models":
                    return self.reply(200, {"object": "list", "data": [{"id": "fake-model"}]})
                if self.path == "/health":
                    return self.reply(fake.health, "")
                if self.path == "/metrics" and fake.metrics is not None:
                    return self.reply(200, fake.metrics.format(**fake.counts))
                return self.flush("GET")

            def do_POST(self):
                text = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(text) if text else None
                if self.receive(body):
                    return None
                if self.path in ("/v1/completions", "/v1/chat/completions"):
                    return fake.complete(self, body)
                if self.path == "/tokenize":
                    return self.reply(200, {"tokens": prompt_ids(body)})
                if self.path == "/detokenize":
                    return self.reply(200, {"prompt": bytes(body["tokens"]).decode()})
                return self.flush("POST")

            def receive(self, body):
                """Records the request; returns whether it has been answered."""
                key = self.headers.get("authorization")
                fake.requests.append((self.path, body, key))
                if fake.key is not None and key != f"Bearer {fake.key}":
                    self.reply(401, {"error": {"message": "no key"}})
                elif self.path in fake.responses:
                    self.reply(fake.status, fake.responses[self.path](body))
                else:
                    return False
                return True

            def flush(self, method):
                if (method, self.path) not in fake.flushes_at:
                    return self.reply(404, {"error": {"message": "no such path"}})
                fake.flushed.append((method, self.path))
                fake.seen = []
                return self.reply(200, {})

            def reply(self, status, value):
                kind, text = "application/json", value
                if isinstance(value, list):
                    kind = "text/event-stream"
                    text = "".join(f"data: {json.dumps(event)}\n\n" for event in value) + "data: [DONE]\n\n"
                elif isinstance(value, dict):
                    text = json.dumps(value)
                text = text if isinstance(text, bytes) else text.encode()
                self.send_response(status)
                self.send_header("content-type", kind)
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
        self.ended.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def die(self):
        """Closes all sockets like a killed process, once a request has been answered."""
        self.answered.wait(LIMIT_S)
        self.is_dead = True
        self.server.shutdown()
        self.server.socket.close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def complete(self, handler, body):
        with self.lock:
            self.bodies.append(body)
            self.paths.append(handler.path)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.lock.notify_all()
            self.opens_at = self.opens_at or time.monotonic() + self.stall
            prompt = prompt_ids(body)
            cached = max((common(prompt, other) for other in self.seen), default=0)
            cached = min(cached, len(prompt) - 1)
            self.seen.append(prompt)
            is_last = len(self.bodies) == self.dies_at
            is_stuck = self.hangs_at is not None and len(self.bodies) >= self.hangs_at
            self.lock.wait_for(lambda: self.most_in_flight >= self.min_in_flight, LIMIT_S)
        try:
            if is_last:
                self.die()
            elif self.is_dead:
                self.ended.wait(LIMIT_S)  # until its connection is closed
            self.ended.wait(max(0.0, self.opens_at - time.monotonic()))
            Stream(self, handler, body, prompt, cached, is_stuck).run()
        finally:
            with self.lock:
                self.in_flight -= 1


class Stream:
    """The streamed answer to one request."""

    def __init__(self, fake, handler, body, prompt, cached, is_stuck):
        self.fake, self.handler, self.body, self.prompt, self.cached = fake, handler, body, prompt, cached
        self.is_chat = "messages" in body
        self.count = body["max_tokens"]
        self.fault = "mute" if is_stuck else fake.fault if "FAULT" in json.dumps(body) else None
        self.n = 1 if self.fault == "one_choice" else body.get("n", 1)

    def run(self):
        fake, handler, fault = self.fake, self.handler, self.fault
        if fake.known_fields is not None and (unknown := self.body.keys() - fake.known_fields):
            return handler.reply(422, {"detail": f"Unexpected fields in the request: {sorted(unknown)}"})
        if fault in ("http_500", "http_503", "http_429"):
            return handler.reply(int(fault[5:]), {"error": {"message": "it broke"}})
        if fault == "cut_early":
            handler.close_connection = True
            return None
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        if fault == "mute":
            return fake.ended.wait(LIMIT_S)
        if self.is_chat:
            self.begin_chat()
        if self.is_chat and fake.message is not None:
            return self.send_message(fake.message(self.body))
        for position in range(0 if fault == "no_output" else self.count):
            for index in range(self.n):
                self.token(index, position)
            time.sleep(fake.delay)
            if fault == "error_event":
                self.event({"error": {"message": "the runtime died"}})
            if fault == "not_json":
                handler.piece(b"data: {oops\n\n")
            if fault == "silent":
                fake.ended.wait(LIMIT_S)
            if fault in ("cut", "error_event"):
                handler.close_connection = True
                return None
        if fault == "truncated":
            return handler.piece(b"")
        if fake.separate_finish and fault != "no_output":
            for index in range(self.n):
                self.event({"choices": [self.choice(index, "", finish_reason="length")]})
        self.end()
        return None

    def begin_chat(self):
        head = {"prompt_token_ids": self.prompt} if self.fake.returns_ids else {}
        for index in range(self.n):
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            self.event({"choices": [role]} | (head if index == 0 else {}))

    def send_message(self, message):
        """Streams a message, two characters an event; a tool call begins with its id and name."""
        deltas = [{"reasoning_content": piece} for piece in pieces(message.get("reasoning_content"))]
        deltas += [{"content": piece} for piece in pieces(message.get("content"))]
        for index, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            head = {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
            deltas.append({"tool_calls": [{"index": index} | head]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                for piece in pieces(function["arguments"])
            ]
        ids = {"token_ids": [7]} if self.fake.returns_ids else {}
        for delta in deltas:
            self.event({"choices": [{"index": 0, "delta": delta} | ids]})
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self.count = len(deltas)
        self.end()

    def token(self, index, position):
        fake = self.fake
        token = output_ids(self.body, self.count, index)[position]
        choice = self.choice(index, output_text(token))
        if fake.returns_ids:
            choice["token_ids"] = [token]
            if position == 0 and not self.is_chat:
                choice["prompt_token_ids"] = [1 << 31] if self.fault == "bad_prompt_ids" else self.prompt
        if not fake.separate_finish and position == self.count - 1:
            choice["finish_reason"] = "length"
        for _ in range(fake.empty_events):
            self.event({"choices": [self.choice(index, "", token_ids=[])]})
        self.event({"choices": [choice], "usage": None})

    def choice(self, index, text, **more):
        output = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return {"index": index, **output, **more}

    def end(self):
        fake, n_generated = self.fake, self.n * self.count
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": n_generated}
        if fake.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        for name, count in (("prompt", len(self.prompt)), ("generated", n_generated), ("cached", self.cached)):
            fake.counts[name] += count
        if self.fault == "null_usage":
            usage["prompt_tokens"] = None
        if self.fault != "no_usage":
            self.event({"choices": [], "usage": usage})
        self.event({"choices": [], "usage": None})
        if self.fake.sends_done:
            self.handler.piece(b"data: [DONE]\n\n")
        self.handler.piece(b"")
        fake.answered.set()

    def event(self, value):
        text = json.dumps(value, ensure_ascii=False).encode()
        if not self.fake.splits_bytes:
            return self.handler.piece(b"data: " + text + b"\n\n")
        text = b": a comment\r\nevent: message\r\ndata:" + text + b"\r\n\r\n"
        for start in range(0, len(text), 7):
            self.handler.piece(text[start : start + 7])
        return None


def prompt_ids(body):
    """Returns the tokens of a request's prompt."""
    prompt = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def output_ids(body, count, index=0):
    """Returns the output tokens of a choice for a request's body or a prompt."""
    prompt = prompt_ids(body if isinstance(body, dict) else {"prompt": body})
    digest = hashlib.sha256(json.dumps([prompt, index]).encode()).digest()
    return [digest[position % 32] for position in range(count)]


def output_text(token):
    return "\u2028é" if token % 2 else f" {token}"


def pieces(text):
    """Returns a text in pieces of two characters."""
    return [text[start : start + 2] for start in range(0, len(text or ""), 2)]


def common(one, other):
    """Returns the length of the common prefix of two prompts."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
