"""Web pages that ``--allowed_origin-origins`` lets in, as their browsers ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.settings.server_config import ServerConfig
from support.running_site import running_site, site_fixture
from support.scripted_runtime import Site

PAGE = "https://app.example"
OTHER = "https://other.example"
KEY = {"Authorization": "Bearer sesame"}
HEADERS = "authorization,content-type,x-stainless-os"
BODY = {"prompt": "ab", "max_tokens": 4}


keyless = site_fixture(ServerConfig(allowed_origins=(PAGE,)))


keyed = site_fixture(ServerConfig(api_key="sesame", allowed_origins=(PAGE,)))


def preflight(site: Site, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    """Sends the CORS preflight of a browser, which has no key."""
    request_headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": HEADERS}
    return site.http.options(path, headers={"Origin": origin, **request_headers})


def allowed_origin(reply: httpx.Response) -> str | None:
    """Returns the origin that may read the response."""
    return reply.headers.get("access-control-allow-origin")


def test_a_preflight_is_answered_without_the_key(keyless: Site, keyed: Site) -> None:
    for site in (keyless, keyed):
        reply = preflight(site, PAGE)
        assert (reply.status_code, allowed_origin(reply)) == (200, PAGE)
        assert "POST" in reply.headers["access-control-allow-methods"].split(", ")
        assert reply.headers["access-control-allow-headers"] == HEADERS
        refused = preflight(site, OTHER)
        assert (refused.status_code, allowed_origin(refused)) == (400, None)


def test_an_allowed_page_reads_its_response(keyless: Site, keyed: Site) -> None:
    for site, key_headers in ((keyless, {}), (keyed, KEY)):
        reply = site.http.post("/v1/completions", json=BODY, headers={"Origin": PAGE, **key_headers})
        assert (reply.status_code, allowed_origin(reply)) == (200, PAGE)
        assert "Origin" in reply.headers["vary"]


def test_an_allowed_page_reads_streams(keyless: Site) -> None:
    body = {**BODY, "stream": True}
    with keyless.http.stream("POST", "/v1/completions", json=body, headers={"Origin": PAGE}) as reply:
        assert allowed_origin(reply) == PAGE
        *events, done = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "abab"
    assert done == "[DONE]"


def test_an_allowed_page_reads_errors(keyless: Site, keyed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fault() -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(keyless.client, "stats", fault)
    for site, method, path, status in (
        (keyless, "GET", "/metrics", 500),
        (keyless, "POST", "/v1/completions", 400),
        (keyless, "GET", "/nowhere", 404),
        (keyless, "DELETE", "/v1/models", 405),
        (keyed, "GET", "/v1/models", 401),
    ):
        reply = site.http.request(method, path, headers={"Origin": PAGE})
        assert (reply.status_code, allowed_origin(reply)) == (status, PAGE)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_other_pages_are_refused_without_a_key(keyless: Site) -> None:
    for headers in ({"Origin": OTHER}, {"Origin": PAGE + ".evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        reply = keyless.http.post("/v1/completions", json=BODY, headers=headers)
        assert (reply.status_code, allowed_origin(reply)) == (403, None)
    elsewhere = keyless.http.get("/metrics", headers={"Origin": PAGE, "Host": "evil.example"})
    assert elsewhere.status_code == 403


def test_local_pages_get_no_cors_headers(keyless: Site) -> None:
    reply = keyless.http.post("/v1/completions", json=BODY, headers={"Origin": "http://localhost:3000"})
    assert (reply.status_code, allowed_origin(reply)) == (200, None)


def test_a_wildcard_origin_works_with_a_key(served_model: ServedModel, tmp_path: Path) -> None:
    server = ServerConfig(api_key="sesame", allowed_origins=("*",))
    with running_site(served_model, tmp_path, server) as site:
        assert preflight(site, OTHER).status_code == 200
        for key_headers, status in (({}, 401), (KEY, 200)):
            reply = site.http.post("/v1/completions", json=BODY, headers={"Origin": OTHER, **key_headers})
            assert (reply.status_code, allowed_origin(reply)) == (status, "*")


def test_by_default_there_are_no_cors_headers(site: Site) -> None:
    assert preflight(site, "http://localhost:3000").status_code == 405
    reply = site.http.post("/v1/completions", json=BODY, headers={"Origin": "http://localhost:3000"})
    assert reply.status_code == 200
    assert not any(name.startswith("access-control") or name == "vary" for name in reply.headers)


CHANGING = ("/flush_cache", "/reset_prefix_cache", "/cache/invalidate", "/cache/pin", "/sessions/s/close")
NEIGHBOUR = "http://localhost:3000"


@pytest.mark.parametrize("path", CHANGING)
def test_a_page_of_another_port_of_this_machine_may_not_change_the_cache(keyless: Site, path: str) -> None:
    own = f"http://{keyless.http.base_url.netloc.decode()}"
    for headers, is_refused in (
        ({"Origin": NEIGHBOUR}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": own}, False),
        ({"Origin": PAGE}, False),
        ({"Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({}, False),
    ):
        reply = keyless.http.post(path, headers=headers)
        assert (reply.status_code == 403) == is_refused, (headers, reply.text)
    assert keyless.http.get("/flush_cache", headers={"Sec-Fetch-Site": "same-site"}).status_code == 403


def test_a_page_of_another_port_may_ask_for_answers(keyless: Site) -> None:
    assert keyless.http.post("/v1/completions", json=BODY, headers={"Origin": NEIGHBOUR}).status_code == 200


def test_with_a_key_the_origin_does_not_matter(keyed: Site) -> None:
    reply = keyed.http.post("/flush_cache", headers={"Origin": NEIGHBOUR, **KEY})
    assert reply.status_code == 200
    assert keyed.http.post("/flush_cache", headers={"Origin": NEIGHBOUR}).status_code == 401
