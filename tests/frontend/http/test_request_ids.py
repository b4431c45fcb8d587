"""Every reply has the id of its request, which the client may give."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from radixkv.settings.server_config import ServerConfig
from support.live import LIMIT_S
from support.running_site import site_fixture
from support.scripted_runtime import FAILS_AFTER_THREE, FAILS_AT_ONCE, Site
from support.site_requests import until_closed

PAGE = "https://app.example"
KEY = {"Authorization": "Bearer sesame"}
HELLO = [{"role": "user", "content": "Hi"}]
MESSAGE = {"messages": HELLO, "max_tokens": 3}


keyed = site_fixture(ServerConfig(api_key="sesame", allowed_origins=(PAGE,)))


REQUESTS: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 3}, 200),
    ("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 3, "stream": True}, 200),
    ("POST", "/v1/completions", {"prompt": [FAILS_AT_ONCE]}, 503),
    ("POST", "/v1/completions", {"prompt": [FAILS_AT_ONCE], "stream": True}, 503),
    ("POST", "/v1/completions", {}, 400),
    ("POST", "/v1/chat/completions", MESSAGE, 200),
    ("POST", "/v1/chat/completions", {**MESSAGE, "stream": True}, 200),
    ("POST", "/v1/chat/completions", {**MESSAGE, "model": "other"}, 404),
    ("POST", "/v1/responses", {"input": "Hi", "stream": True}, 200),
    ("POST", "/v1/messages", MESSAGE, 200),
    ("POST", "/v1/messages", {**MESSAGE, "stream": True}, 200),
    ("POST", "/v1/messages", {"messages": HELLO}, 400),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}, 200),
    ("POST", "/generate", {"text": "ab", "stream": True}, 200),
    ("POST", "/tokenize", {"prompt": "ab"}, 200),
    ("POST", "/v1/embeddings", {}, 400),
    ("GET", "/v1/models", None, 200),
    ("GET", "/health", None, 200),
    ("HEAD", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/ui", None, 200),
    ("GET", "/openapi.json", None, 200),
    ("GET", "/nowhere", None, 404),
    ("DELETE", "/v1/models", None, 405),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), REQUESTS, ids=lambda value: str(value)[:40])
def test_every_reply_has_the_id_of_its_request(keyed: Site, method: str, path: str, body: Any, status: int) -> None:
    for given in ({}, {"X-Request-Id": "order-17/b"}):
        reply = keyed.http.request(method, path, json=body, headers={**KEY, **given})
        assert reply.status_code == status, reply.text
        (found,) = reply.headers.get_list("x-request-id")
        if given:
            assert found == "order-17/b"
        else:
            assert re.fullmatch(r"[0-9a-f]{32}", found)
        assert reply.headers.get("request-id") == (found if path.startswith("/v1/messages") else None)


def test_a_stream_that_fails_has_the_id_of_its_request(keyed: Site) -> None:
    body = {"prompt": [FAILS_AFTER_THREE, 1], "stream": True}
    keyed.loop.may_fail = False
    with keyed.http.stream(
        "POST", "/v1/completions", json=body, headers={**KEY, "X-Request-Id": "order-17"}
    ) as reply:
        lines = reply.iter_lines()
        assert "choices" in next(lines)
        keyed.loop.may_fail = True
        assert any("numerical_error" in line for line in lines)
    assert reply.headers.get_list("x-request-id") == ["order-17"]


def test_what_is_refused_at_the_door_has_an_id(keyed: Site, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"X-Request-Id": "order-17"}
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a"}
    replies = [
        keyed.http.post("/v1/completions", json={}, headers=given),
        site.http.get("/v1/models", headers={**given, "Host": "elsewhere.example"}),
        keyed.http.options("/v1/completions", headers={**given, **preflight}),
    ]

    async def fault() -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(site.client, "stats", fault)
    replies.append(site.http.get("/metrics", headers=given))
    assert [reply.status_code for reply in replies] == [401, 403, 200, 500]
    assert all(reply.headers.get_list("x-request-id") == ["order-17"] for reply in replies)


def test_pages_of_other_sites_may_read_the_id(keyed: Site) -> None:
    reply = keyed.http.get("/v1/models", headers={"Origin": PAGE, **KEY})
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "caf\u00e9", "a\tb"])
def test_an_id_that_is_no_short_word_is_replaced(site: Site, given: str) -> None:
    reply = site.http.get("/version", headers=[(b"X-Request-Id", given.encode())])
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
    assert site.http.get("/version", headers={"X-Request-Id": "a" * 128}).headers["x-request-id"] == "a" * 128


def test_ids_differ(site: Site) -> None:
    assert len({site.http.get("/version").headers["x-request-id"] for _ in range(20)}) == 20


def test_bytes_that_are_not_http_are_answered_with_an_id(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GARBAGE\r\n\r\n")
        reply = until_closed(connection)
    assert re.search(rb"(?i)\r\nx-request-id: [0-9a-f]{32}\r\n", reply)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_whose_body_is_not_http_is_answered_with_its_id(site: Site, path: str) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: order-17\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode() + b"nonsense\r\n")
        reply = until_closed(connection)
    assert re.match(rb"HTTP/1.1 400 ", reply)
    assert re.findall(rb"(?i)\r\nx-request-id: ([^\r]*)\r\n", reply) == [b"order-17"]
    assert (b'"type":"error"' in reply) is (path == "/v1/messages")
