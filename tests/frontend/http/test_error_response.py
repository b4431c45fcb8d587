"""Error responses to clients that are still sending the body."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.errors import Draining
from radixkv.frontend.http import error_response
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.connection import REQUEST_TIMEOUT_S
from radixkv.frontend.http.error_response import DISCARD_TIMEOUT_S
from radixkv.frontend.process import RESPONSE_TIMEOUT_S
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.server_config import ServerConfig
from support import running_site as sites
from support.live import LIMIT_S
from support.running_site import running_site, site_fixture
from support.scripted_runtime import Site
from support.site_requests import COMPLETIONS_HEAD, until_closed

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
LONG = b" " * (9 << 20)
"""Longer than the buffers between client and server."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_response, "DISCARD_TIMEOUT_S", LIMIT_S)  # the machine may be busy


guarded = site_fixture(ServerConfig(api_key="sesame"))


def by_urllib(site: Site, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Sends with urllib, which sets ``Connection: close`` and reads only after it has sent everything."""
    request = urllib.request.Request(f"http://127.0.0.1:{site.port}{path}", LONG, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    with caught.value as reply:
        return reply.code, reply.read()


def by_http_client(site: Site, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, LONG, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@pytest.mark.parametrize("send", [by_urllib, by_http_client])
def test_a_client_that_sends_everything_first_reads_its_refusal(
    site: Site, guarded: Site, send: Callable[[Site, str, dict[str, str]], tuple[int, bytes]]
) -> None:
    for where, path, headers, status, code in (
        (site, COMPLETIONS, JSON, 413, "body_too_large"),
        (site, COMPLETIONS, JSON | {"Origin": "https://example.org"}, 403, "forbidden"),
        (guarded, COMPLETIONS, JSON, 401, "invalid_api_key"),
        (site, "/nowhere", JSON, 404, "not_found"),
        (site, "/v1/models", JSON, 405, "method_not_allowed"),
        (site, "/v1/embeddings", JSON, 400, "unsupported_feature"),
        (site, COMPLETIONS, {"Content-Type": "text/plain"}, 400, "invalid_request"),
        (site, COMPLETIONS, JSON | {"Content-Encoding": "gzip"}, 400, "unsupported_feature"),
    ):
        for _ in range(5):
            found, body = send(where, path, headers)
            assert (found, json.loads(body)["error"]["code"]) == (status, code)


def test_the_response_does_not_wait_for_the_body(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S / 2) as connection:
        connection.sendall(COMPLETIONS_HEAD + b"Content-Length: 9000000\r\n\r\n")
        assert b"body_too_large" in connection.recv(4096)


def test_a_stalled_body_is_not_waited_for_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_response, "DISCARD_TIMEOUT_S", 0.2)
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(COMPLETIONS_HEAD + b"Content-Length: 9000000\r\n\r\n")
        while connection.recv(4096):
            pass


def test_an_endless_body_is_not_read_forever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_response, "MAX_DISCARD_BYTES", 1 << 20)
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(COMPLETIONS_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(chunk * 1000)


def test_a_server_that_shuts_down_waits_for_no_upload(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_reader = BodyReader(100)
    monkeypatch.setattr(sites, "BodyReader", lambda *_: body_reader)

    async def end() -> None:
        body_reader.refuse(Draining("the server is shutting down"))

    with (
        running_site(served_model, tmp_path) as site,
        socket.create_connection(("127.0.0.1", site.port), timeout=REQUEST_TIMEOUT_S / 2) as connection,
    ):
        site.call(end())
        connection.sendall(COMPLETIONS_HEAD + b"Connection: close\r\nContent-Length: 100\r\n\r\n{")
        reply = until_closed(connection)
    assert reply.startswith(b"HTTP/1.1 503 ")


def test_the_discard_ends_before_the_shutdown_timeout() -> None:
    assert DISCARD_TIMEOUT_S < RESPONSE_TIMEOUT_S
