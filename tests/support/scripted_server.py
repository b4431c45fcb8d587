"""A server that answers with what a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = dict[str, Any] | list[Any] | bytes
"""An object, the objects of events, or a body as it is."""


class ScriptedServer:
    """Paths to what they answer. Use it as ``with``."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], Answer]] = {}
        self.asked: list[tuple[str, Any, str | None]] = []
        """Path, body and key of each request."""
        self.status = 200
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(text) if text else None
                scripted.asked.append((self.path, body, self.headers.get("authorization")))
                answer = scripted.answers[self.path](body)
                is_stream = isinstance(answer, list)
                if is_stream:
                    events = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in answer)
                    answer = events + b"data: [DONE]\n\n"
                self.send_response(scripted.status)
                self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
                self.end_headers()
                self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
