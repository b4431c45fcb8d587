"""``/ui``, ``/cache/tree`` and its events, on a runtime with a fixed tree."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import Draining
from radixkv.frontend.api.ui.watch import INTERVAL_S, CacheWatch
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.cache_messages import TierOutline, TreeNode
from support.live import wait_for
from support.running_site import running_site, site_fixture
from support.scripted_runtime import DISK, DRAFTS, HOST, PAUSES, STATES, WINDOWS, ScriptedLoop, Site

KEY = "the-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


guarded_site = site_fixture(ServerConfig(api_key=KEY))
"""A site with a key, which therefore shows no contents."""


@contextmanager
def events(site: Site, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with site.http.stream("GET", "/cache/tree/events", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))


def n_tasks(site: Site) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return site.call(count())


def test_the_root_leads_to_the_page(site: Site, guarded_site: Site) -> None:
    for one in (site, guarded_site):
        assert one.http.get("/", follow_redirects=False).is_redirect
        page = one.http.get("/", follow_redirects=True)
        assert (page.status_code, page.url.path, page.text) == (200, "/ui", one.http.get("/ui").text)
        assert one.http.head("/").is_redirect
        assert one.http.post("/").status_code == 405


def test_the_tree_has_what_the_runtime_outlines(site: Site) -> None:
    reply = site.http.get("/cache/tree")
    assert reply.status_code == 200, reply.text
    shown = reply.json()
    device = shown["tiers"].pop("device")
    assert shown["tiers"] == {}
    more, less = {"more": 3, "more_pages": 4}, {"more": 1, "more_pages": 6}
    run = {"starts_with": "di", "leases": 1, "hits": 2, "is_pinned": True}
    assert device.pop("nodes") == [
        {"id": 1, "parent": -1, "own_pages": 0, "pages": 20, "age": 5, "namespace": "", "leases": 1, **more},
        {"id": 2, "parent": 0, "own_pages": 16, "pages": 16, "age": 0, **run},
        {"id": 3, "parent": -1, "own_pages": 0, "pages": 6, "age": None, "namespace": "5eed0001", **less},
    ]
    counts = {"capacity": 64, "free": 32, "evictable": 16, "pinned": 8}
    assert device == {"pages": 30, "pages_not_visited": 4, "more": 0, "more_pages": 0, **counts}
    assert shown["load"] == {"running": 0, "waiting": 7, "max_running": 256}
    assert (shown["totals"]["prefix_queries"], shown["totals"]["prefix_hits"]) == (100, 40)
    assert "draft_tokens" not in shown["totals"]


def test_drafts_are_counted_where_they_are_on(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, ready=ScriptedLoop(drafts=DRAFTS).ready), tmp_path) as site:
        site.loop.drafts = DRAFTS
        totals = site.http.get("/cache/tree").json()["totals"]
    assert (totals["draft_tokens"], totals["accepted_tokens"]) == (60, 25)


def test_states_are_counted_where_there_are_any(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, ready=ScriptedLoop().ready), tmp_path) as site:
        assert "states" not in site.http.get("/cache/tree").json()["tiers"]["device"]
        site.loop.states = STATES
        time.sleep(INTERVAL_S)
        shown = site.http.get("/cache/tree").json()
    assert shown["tiers"]["device"]["states"] == {"capacity": 20, "free": 4}
    assert (shown["totals"]["state_hits"], shown["totals"]["states_evicted"]) == (33, 24)


def test_tails_are_counted_where_there_are_window_pages(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, ready=ScriptedLoop().ready), tmp_path) as site:
        assert "tail_hits" not in site.http.get("/cache/tree").json()["totals"]
        site.loop.windows = WINDOWS
        time.sleep(INTERVAL_S)
        totals = site.http.get("/cache/tree").json()["totals"]
    assert (totals["tail_hits"], totals["tails_evicted"]) == (WINDOWS.hits_total, WINDOWS.evicted_total)


def test_pauses_are_shown_where_they_are_learnt(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, ready=ScriptedLoop().ready), tmp_path) as site:
        assert "pauses" not in site.http.get("/cache/doctor").json()
        site.loop.pauses = PAUSES
        shown = site.http.get("/cache/tree").json()["pauses"]
        assert site.http.get("/cache/doctor").json()["pauses"] == shown
        assert "search" not in site.http.get("/metrics").text
    assert (shown["open"], shown["returns"], shown["returns_on_device"], shown["given_up"]) == (3, 10, 8, 2)
    assert shown["text"] == (
        "3 chats are expected to go on; 80% of 10 that went on were cached on the device as a whole"
    )
    first = shown["kinds"][0]
    assert (first["tools"], first["return_share"], first["median_seconds"]) == ("search", 0.8, 0.52)
    assert [one.get("tenant") for one in shown["kinds"]] == [None, None, "batch"]
    assert [one["text"] for one in shown["kinds"]] == [
        "tool search: 80% of 10 came back, of these 75% were on the device, and lately half came within 0.52 s, "
        "nine of ten within 2 s, 2 expected",
        "users: 100% of 2 came back, of these 100% were on the device, and lately half came within 12 s, "
        "nine of ten within 40 s, 1 expected",
        "tools f, g of batch: none of 1 came back",
    ]


def test_the_doctor_needs_no_runtime(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_site(replace(served_model, ready=ScriptedLoop().ready), tmp_path) as site:
        whole = site.http.get("/cache/doctor").json()
        with monkeypatch.context() as silence:
            silence.setattr("radixkv.frontend.api.doctor.PAUSES_LIMIT_S", 0.1)
            silence.setattr(site.loop, "receive", lambda message: [])
            silent = site.http.get("/cache/doctor")
        site.loop.pauses = PAUSES
        site.client.refusal = Draining("the server is shutting down")
        draining = site.http.get("/cache/doctor").json()
        site.events.call_soon_threadsafe(site.client.fail, RuntimeRestarting("the runtime is started again"))
        restarting = site.http.get("/cache/doctor")
    why = "no pauses are shown: the runtime did not answer within 0.1 s"
    assert (silent.status_code, silent.json()) == (200, whole | {"pauses_missing": why})
    assert draining["pauses"]["returns"] == 10
    why = "no pauses are shown: the runtime is started again"
    assert (restarting.status_code, restarting.json()) == (200, whole | {"pauses_missing": why})


def test_each_tier_that_there_is_is_shown(served_model: ServedModel, tmp_path: Path) -> None:
    ready = ScriptedLoop(host=HOST, disk=DISK).ready
    with running_site(replace(served_model, ready=ready), tmp_path) as site:
        site.loop.host, site.loop.disk = HOST, DISK
        tiers = site.http.get("/cache/tree").json()["tiers"]
    nothing = {"pages": 0, "pages_not_visited": 0, "more": 0, "more_pages": 0, "nodes": []}
    assert tiers["host"] == {**nothing, "capacity": 200, "free": 150, "pinned": 25}
    assert tiers["storage"] == {"pages": 70, "bytes": 77000}


def test_seconds_since_the_last_use_and_the_joint_tree_are_shown_where_there_are_any(
    served_model: ServedModel, tmp_path: Path
) -> None:
    ready = ScriptedLoop(host=HOST).ready
    with running_site(replace(served_model, ready=ready), tmp_path) as site:
        assert "joint" not in site.http.get("/cache/tree").json()
        site.loop.host = HOST
        site.loop.joint = TierOutline(
            (
                TreeNode(1, -1, 0, 5, 0, 0, 3, False, idle_s=12.34, tiers=("device", "host")),
                TreeNode(2, 0, 5, 5, 0, 0, None, False, tiers=("host",), has_state=True),
            ),
            5,
            0,
            0,
            0,
        )
        time.sleep(INTERVAL_S)
        joint = site.http.get("/cache/tree").json()["joint"]
    assert (joint["pages"], joint["pages_not_visited"]) == (5, 0)
    root, run = joint["nodes"]
    assert (root["idle_seconds"], root["tiers"]) == (12.3, ["device", "host"])
    assert "idle_seconds" not in run
    assert run["tiers"] == ["host"]
    assert run["has_state"] is True
    assert "has_state" not in root


def test_viewers_share_an_answer(site: Site, served_model: ServedModel) -> None:
    n_before = len(site.loop.outlined)

    async def look() -> list[bytes]:
        watch = CacheWatch(site.client, served_model, contents=True, interval_s=3600.0)
        streams = [watch.events() for _ in range(3)]
        seen = await asyncio.gather(watch.snapshot(), *map(anext, streams))
        for stream in streams:
            await stream.aclose()
        return seen

    snapshot, *events = site.call(look())
    assert all(event == b"data: " + snapshot + b"\n\n" for event in events)
    assert len(site.loop.outlined) == n_before + 1


def test_nobody_asks_the_runtime_after_the_last_viewer(site: Site) -> None:
    n_before, tasks_before = len(site.loop.outlined), n_tasks(site)
    with events(site) as stream:
        first, second = next(stream), next(stream)
    assert first["time"] < second["time"], "the stream goes on with new answers"
    assert len(site.loop.outlined) > n_before
    wait_for(lambda: n_tasks(site) <= tasks_before, "a closed stream leaves a task")
    n_after = len(site.loop.outlined)
    time.sleep(1.2 * INTERVAL_S)
    assert len(site.loop.outlined) == n_after


def test_a_viewer_that_leaves_while_it_asks_does_not_stop_the_others(site: Site, served_model: ServedModel) -> None:
    async def leave_and_look() -> bytes:
        watch = CacheWatch(site.client, served_model, contents=True)
        leaving = asyncio.create_task(watch.snapshot())
        staying = asyncio.create_task(watch.snapshot())
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert json.loads(site.call(leave_and_look()))["model"] == "echo"


def test_a_stream_ends_when_the_server_drains(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(served_model, tmp_path) as site, events(site) as stream:
        next(stream)
        site.client.refusal = Draining("the server is shutting down")
        assert len(list(islice(stream, 3))) <= 1


def test_a_server_with_a_key_shows_the_tree_to_those_who_have_it(guarded_site: Site) -> None:
    for path in ("/cache/tree", "/cache/tree/events"):
        assert guarded_site.http.get(path).status_code == 401
    shown = guarded_site.http.get("/cache/tree", headers=HEADERS).json()
    assert shown["has_contents"] is False
    assert [message.contents for message in guarded_site.loop.outlined] == [False]
    assert "starts_with" not in json.dumps(shown)


def test_the_page_needs_no_key_and_has_no_data(guarded_site: Site, site: Site) -> None:
    reply = guarded_site.http.get("/ui")
    assert reply.status_code == 200
    assert reply.text == site.http.get("/ui").text
    assert guarded_site.http.head("/ui").status_code == 200
    assert guarded_site.http.post("/ui").status_code == 405


class Elements(HTMLParser):
    """Collects what a page loads and what its style and script contain."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: dict[str, str] = {}
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag if tag in ("style", "script") else ""
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline[self._inside] = self.inline.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def test_a_browser_runs_nothing_but_what_the_page_brings(site: Site) -> None:
    reply = site.http.get("/ui")
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    elements = Elements()
    elements.feed(reply.text)
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(elements.inline[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert elements.loads == ["data:,"]
    assert elements.handlers == [], "the policy forbids inline handlers and styles"
    assert not re.search("unsafe", reply.headers["content-security-policy"])


def test_a_page_of_another_site_cannot_read_the_tree(site: Site) -> None:
    reply = site.http.get("/cache/tree", headers={"Origin": "https://elsewhere.example"})
    assert reply.status_code == 403
