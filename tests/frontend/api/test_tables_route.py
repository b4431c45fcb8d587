"""``/cache/tables`` on a runtime with fixed tables: which request an id names, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv.frontend.api.tables import waits_for
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.cache_messages import Tier
from radixkv.wire.table_messages import ChoiceTable, LoadStage
from support.running_site import site_fixture
from support.scripted_runtime import Site

KEY = "the-key"
guarded_site = site_fixture(ServerConfig(api_key=KEY))
POOL = {"pages": 64, "free": 32, "cached": 28, "leased": 2, "own": 1, "windows": 1}
TABLE = [
    {"logical": 0, "physical": 7, "filled": 16, "kind": "tree", "references": 2, "tier": "device"},
    {"logical": 1, "physical": 3, "filled": 16, "kind": "tree", "references": 1, "tier": "device"},
    {"logical": 2, "physical": 9, "filled": 5, "kind": "own", "references": 1, "tier": "device"},
]


@contextmanager
def running(site: Site, path: str, body: dict[str, Any], **headers: str) -> Iterator[str]:
    """Streams an endless answer; yields the id of the reply as its first event tells it."""
    site.loop.step_s = 0.01
    with site.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as reply:
        assert reply.status_code == 200
        lines = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        event = next(lines)
        message = event.get("message") or event.get("response") or event.get("meta_info") or event
        yield message["id"]


COMPLETION = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
CHAT = [{"role": "user", "content": "abc"}]
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 400, "ignore_eos": True},
    "/v1/messages": {"model": "echo", "messages": CHAT, "max_tokens": 400},
    "/v1/responses": {"input": "abc", "max_output_tokens": 400},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_id_of_a_reply_names_its_request(site: Site, path: str) -> None:
    with running(site, path, BODIES[path], **{"X-Request-Id": "mine"}) as name:
        for one in (name, "mine"):
            reply = site.http.get("/cache/tables", params={"request": one})
            assert reply.status_code == 200, reply.text
            (request,) = reply.json()["requests"]
            assert (request["id"], request["request_id"]) == (site.loop.submitted[-1].id, "mine")
            assert name.endswith(request["id"])


def test_a_table_has_its_pages_and_the_pool(site: Site) -> None:
    with running(site, "/v1/completions", COMPLETION, **{"X-Request-Id": "mine"}):
        shown = site.http.get("/cache/tables?request=mine").json()
        part = site.http.get("/cache/tables?request=mine&first=2").json()
        listed = site.http.get("/cache/tables").json()
    assert (shown["page_size"], shown["pool"], shown["more"]) == (16, POOL, 0)
    counts = {"pages": 3, "in_tree": 2, "shared": 1, "own": 1, "tiers": {"device": 3}, "batch_slot": 0}
    tokens = {"prompt_tokens": 3, "tokens": 37, "stored_tokens": 37}
    choice = {"index": 0, "phase": "running", **tokens, **counts}
    assert shown["requests"][0]["choices"] == [{**choice, "table": TABLE}]
    assert part["requests"][0]["choices"] == [{**choice, "table": TABLE[2:]}]
    assert listed["requests"][0]["choices"] == [choice]
    assert site.loop.tabled[-1].requests == ()


def test_several_prompts_have_the_id_of_their_reply_in_common(site: Site) -> None:
    body = {"prompt": [[1, 2], [3, 4]], "max_tokens": 400, "n": 2, "ignore_eos": True}
    with running(site, "/v1/completions", body) as name, running(site, "/v1/completions", COMPLETION):
        found = site.http.get("/cache/tables", params={"request": name}).json()["requests"]
        ids = [one.id for one in site.loop.submitted[-3:-1]]
        assert [one["id"] for one in found] == ids
        assert [[choice["index"] for choice in one["choices"]] for one in found] == [[0, 1], [0, 1]]
        (second,) = site.http.get("/cache/tables", params={"request": ids[1]}).json()["requests"]
        assert second["id"] == ids[1]
        assert len(site.http.get("/cache/tables").json()["requests"]) == 3


def test_a_request_that_has_ended_is_not_found(site: Site) -> None:
    ended = site.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).json()["id"]
    with running(site, "/v1/completions", COMPLETION) as name:
        for wrong in (ended, "nobody", name[:-1], f"{name}-", f"{name}-x", "cmpl-", "-", "x" * 1000):
            reply = site.http.get("/cache/tables", params={"request": wrong})
            assert reply.status_code == 404, wrong
            error = reply.json()["error"]
            assert (error["code"], error["param"], error["type"]) == (
                "request_not_found",
                "request",
                "NotFoundError",
            )
            assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("request=", "request"),
        ("first=-1", "first"),
        ("first=x", "first"),
        ("first=", "first"),
        ("first=2.0", "first"),
    ]
    + [("first=٣", "first"), (f"first={1 << 31}", "first"), (f"first={'9' * 5000}", "first")],
)
def test_what_cannot_be_shown_is_refused(site: Site, query: str, param: str) -> None:
    reply = site.http.get(f"/cache/tables?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_it_needs_the_key(guarded_site: Site) -> None:
    for path in ("/cache/tables", "/cache/tables?request=mine"):
        assert guarded_site.http.get(path).status_code == 401
        assert guarded_site.http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    key = {"Authorization": f"Bearer {KEY}"}
    assert guarded_site.http.get("/cache/tables", headers=key).json()["requests"] == []


def test_pages_of_other_sites_may_not_ask(site: Site) -> None:
    assert site.http.get("/cache/tables", headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("stage", "tier", "n_pages", "words"),
    [
        (None, None, 0, None),
        ("lookup", "storage", 0, "the shared store to say which pages of the prompt it has"),
        ("fetch", "storage", 1, "1 page to be read from disk or the shared store into the host tier"),
        ("fetch", "storage", 0, "pages to be read from disk or the shared store into the host tier"),
        ("copy", "host", 1200, "1,200 pages to be copied from the host tier to the device"),
        ("copy", "storage", 2, "2 pages to be copied from shared memory to the device"),
        ("copied", "host", 0, "its turn: the pages that it has waited for are on the device"),
    ],
)
def test_what_a_choice_waits_for_is_said_in_words(
    stage: LoadStage | None, tier: Tier | None, n_pages: int, words: str | None
) -> None:
    table = ChoiceTable(0, "loading", 20, 20, 0, n_loading=n_pages, loading_from=tier, load_stage=stage)
    assert waits_for(table) == words
