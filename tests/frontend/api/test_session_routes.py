"""The field ``session_id`` and the route ``/sessions/{id}/close``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.served_model import ServedModel
from support import running_site as sites
from support.running_site import running_site
from support.scripted_runtime import HOST, Site
from support.site_requests import asks, post


def ask(site: Site, session_id: str | None, **fields: Any) -> str:
    """Sends a completion; returns the session that the runtime sees."""
    body = {"prompt": [5, 6], "max_tokens": 1, "session_id": session_id, **fields}
    assert site.http.post("/v1/completions", json=body).status_code == 200
    return site.loop.submitted[-1].session_id


APIS = asks("a") | {"/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("session_id", ["", None])
def test_a_body_may_name_no_session(site: Site, path: str, session_id: str | None) -> None:
    post(site, path, **APIS[path], session_id=session_id)
    assert site.loop.submitted[-1].session_id == ""


@pytest.mark.parametrize(("path", "body"), APIS.items())
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_the_session_of_a_body_without_one(
    site: Site, path: str, body: dict[str, Any], stream: bool
) -> None:
    headers = {"X-Session-Id": "from-the-header"}
    for fields, expected in (({}, "from-the-header"), ({"session_id": "mine"}, "mine")):
        n_before = len(site.loop.submitted)
        reply = site.http.post(path, json={**body, **fields, "stream": stream}, headers=headers)
        assert reply.status_code == 200, reply.text
        assert {prompt.session_id for prompt in site.loop.submitted[n_before:]} == {expected}
        assert site.http.post(f"/sessions/{expected}/close").status_code == 200


@pytest.mark.parametrize(("path", "body"), APIS.items())
def test_a_header_that_is_too_long_is_refused(site: Site, path: str, body: dict[str, Any]) -> None:
    reply = site.http.post(path, json=body, headers={"X-Session-Id": "x" * 129})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "session_id")


def test_sessions_of_agents_are_ignored_with_one_line(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = [
        {"X-Claude-Code-Session-Id": "a"},
        {"session-id": "b", "thread-id": "b"},
        {"X-SMG-Routing-Key": "c"},
        {"session_id": "d"},
    ]
    lines: list[str] = []
    monkeypatch.setattr(sites, "BodyReader", lambda *limits: BodyReader(*limits, log=lines.append))
    with running_site(served_model, tmp_path) as site:
        for _ in range(2):
            for headers in agents:
                reply = site.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
                assert reply.status_code == 200
                assert site.loop.submitted[-1].session_id == ""
        site.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Session-Id": "e"})
    assert len(lines) == len(agents)
    assert [name for line, headers in zip(lines, agents, strict=True) for name in headers if name.lower() in line]


@pytest.mark.parametrize("session_id", ["plain", "with space", "a/b", "ü%2F", "close"])
def test_a_session_is_closed_by_its_id(site: Site, session_id: str) -> None:
    assert ask(site, session_id) == session_id
    reply = site.http.post(f"/sessions/{quote(session_id, safe='')}/close")
    assert (reply.status_code, reply.json()) == (200, {"session_id": session_id, "pages_demoted": {"device": 3}})


def test_a_session_belongs_to_its_salt(site: Site) -> None:
    ask(site, "salted", cache_salt="hers")
    for body in ({}, {"cache_salt": None}, {"cache_salt": "his"}):
        reply = site.http.post("/sessions/salted/close", json=body)
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            "NotFoundError",
            "session_not_found",
            "session_id",
        )
    site.loop.host = HOST
    reply = site.http.post("/sessions/salted/close", json={"cache_salt": "hers"})
    assert reply.json() == {"session_id": "salted", "pages_demoted": {"device": 3, "host": 2}}


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/sessions/s/close", b'{"cache_salt": 5}', "cache_salt"),
        ("/sessions/s/close", b'{"cache_salt": "' + b"x" * 129 + b'"}', "cache_salt"),
        ("/sessions/s/close", b"[]", None),
        ("/sessions/s/close", b"{", None),
        (f"/sessions/{'x' * 129}/close", b"{}", "session_id"),
    ],
)
def test_a_wrong_close_is_refused(site: Site, path: str, content: bytes, param: str | None) -> None:
    ask(site, "s")
    reply = site.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert site.http.post("/sessions/s/close", content=b"{}").status_code == 400, "no Content-Type"
