"""With ``--api-key`` every route but liveness needs the key, however a path is written."""

from __future__ import annotations

import socket

import pytest

from radixkv.settings.server_config import ServerConfig
from support.live import LIMIT_S
from support.running_site import site_fixture
from support.scripted_runtime import Site
from support.site_requests import until_closed

KEY = "sesame-0123456789"
KEY_HEADERS = {"Authorization": f"Bearer {KEY}"}


guarded = site_fixture(ServerConfig(api_key=KEY))


def status(site: Site, target: str, headers: str = "") -> int:
    """Returns the response status for a request target sent exactly as written."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode())
        return int(until_closed(connection).split()[1])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/flush_cache"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/cache/invalidate"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("GET", "/server_info"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("OPTIONS", "/v1/completions"),
        ("DELETE", "/health/x"),
    ],
)
def test_every_route_but_liveness_needs_the_key(guarded: Site, method: str, path: str) -> None:
    refused = guarded.http.request(method, path)
    assert refused.status_code == 401
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", "invalid_api_key", None)
    assert KEY not in refused.text
    assert guarded.http.request(method, path, headers=KEY_HEADERS).status_code != 401


def test_liveness_needs_no_key(guarded: Site) -> None:
    for path in ("/health", "/ping"):
        assert guarded.http.get(path).status_code == guarded.http.head(path).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        KEY,
        "Bearer",
        f"Basic {KEY}",
        f"Bearer{KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}0",
        f"Bearer {KEY.upper()}",
        f"Bearer {KEY} {KEY}",
        f"Bearer Bearer {KEY}",
        "Bearer sesäme",
    ],
)
def test_wrong_keys_are_refused(guarded: Site, value: str) -> None:
    headers = {"Authorization": value.encode("latin-1")}
    assert guarded.http.get("/version", headers=headers).status_code == 401


def test_a_missing_key_and_a_wrong_key_have_two_texts(guarded: Site) -> None:
    def refusal(**headers: str) -> dict[str, str]:
        reply = guarded.http.get("/version", headers=headers)
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert error["code"] == "invalid_api_key"
        return error["message"]

    missing = {refusal(), refusal(Authorization="Bearer"), refusal(Authorization=f"Basic {KEY}")}
    wrong = {refusal(Authorization=f"Bearer {key}") for key in ("x", KEY[:-1], KEY + "0", "y" * 5000)}
    assert len(missing) == len(wrong) == 1
    assert missing != wrong
    assert KEY not in str(missing | wrong)


def test_the_scheme_may_be_written_in_any_case(guarded: Site) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert guarded.http.get("/version", headers={"Authorization": f"{scheme}  {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "/metrics/",
        "//metrics",
        "//health/../metrics",
        "/health/../metrics",
        "/health/",
        "//health",
        "/health%2f..%2fmetrics",
        "/%2e%2e/metrics",
        "/m%65trics",
        "/health%00",
        "/health%0a",
        "/Health",
        "/health;x/metrics",
        "/metrics?/health",
        "/metrics#/health",
        "http://x/health",
        "http://x/metrics",
    ],
)
def test_no_spelling_of_a_path_passes_as_liveness(guarded: Site, target: str) -> None:
    assert status(guarded, target) in (400, 401)


def test_an_encoded_path_is_the_path_that_is_routed(guarded: Site) -> None:
    assert status(guarded, "/h%65alth") == 200
    assert status(guarded, "/health?x=/metrics") == 200
    assert status(guarded, "/m%65trics", f"Authorization: Bearer {KEY}\r\n") == 200


def test_paths_in_headers_are_ignored(guarded: Site) -> None:
    for name in ("X-Forwarded-Prefix", "X-Original-URL", "X-Rewrite-URL", "X-Script-Name"):
        assert guarded.http.get("/version", headers={name: "/health"}).status_code == 401


def test_a_request_with_the_key_may_have_any_host_and_origin(guarded: Site) -> None:
    headers = {**KEY_HEADERS, "Host": "gpu.example.org", "Origin": "https://app.example.org"}
    reply = guarded.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}, headers=headers)
    assert reply.json()["choices"][0]["text"] == "ab"


def test_the_key_is_never_in_a_response(guarded: Site) -> None:
    reply = guarded.http.get("/server_info", headers=KEY_HEADERS)
    assert reply.json()["needs_api_key"] is True
    assert KEY not in reply.text


def test_a_refused_request_leaves_its_connection_usable(guarded: Site) -> None:
    body = {"prompt": "x" * 50_000}
    for _ in range(3):
        assert guarded.http.post("/v1/completions", json=body).status_code == 401
    assert guarded.http.get("/version", headers=KEY_HEADERS).status_code == 200
