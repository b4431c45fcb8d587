"""A test server with the hub's file API."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A server of repositories, each a mapping of file names to contents. It records all requests."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.missing_files: set[str] = set()
        """Files that are listed but cannot be downloaded."""
        self.error_response: tuple[int, dict[str, str]] | None = None
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(*hub.answer("GET", self.path))

            def do_HEAD(self) -> None:
                self.reply(*hub.answer("HEAD", self.path))

            def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def downloaded(self) -> list[str]:
        """Returns the names of the files that were downloaded."""
        return [path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def answer(self, method: str, target: str) -> tuple[int, dict[str, str], bytes]:
        path = unquote(urlsplit(target).path)
        self.requests.append((method, path))
        if self.error_response is not None:
            status, headers = self.error_response
            return status, headers, b"{}"
        parts = path.strip("/").removeprefix("api/models/").split("/")
        files = self.repositories.get("/".join(parts[:2]))
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        kind, revision = (parts[2], parts[3]) if len(parts) > 3 else ("revision", "main")
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings}).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        name = "/".join(parts[4:])
        if name not in files or name in self.missing_files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = hashlib.sha1(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[name]


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Runs a hub on a free port."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
