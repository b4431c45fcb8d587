"""A real server with ``--restart-runtime`` whose runtime is killed, under load, during its start and too often."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.event_subscriber import event_flags, following
from support.live import HERE, LIMIT_S, LiveServer, children, is_running, serving, wait_for
from support.page_files import page_files
from support.restart_load import RUNTIME_CODES, asking

Start = Callable[..., AbstractContextManager[LiveServer]]
TIERS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-total-tokens", "8192", "--max-num-seqs", "8")
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? " * 4
LONG = {"prompt": "Hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
BRIEF = {**LONG, "max_tokens": 10}


def ask(server: LiveServer) -> tuple[list[int], dict[str, int]]:
    """Returns an answer's tokens, and where its prompt's cached tokens came from."""
    reply: Any = server.complete(prompt=STORY, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    details = reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return reply["choices"][0]["token_ids"], details


def kill_runtime(server: LiveServer) -> None:
    """Kills the runtime, and waits until the server knows."""
    os.kill(server.runtime_pid, signal.SIGKILL)
    wait_for(lambda: server.http.get("/health").status_code == 503, "still healthy")


def next_runtime(server: LiveServer) -> None:
    """Waits for the process of the next runtime, which need not be ready."""
    killed = server.runtime_pid
    wait_for(lambda: children(server.process.pid) not in ([], [killed]), "no runtime is started")
    (server.runtime_pid,) = children(server.process.pid)


def n_device_pages(server: LiveServer) -> int:
    return server.http.get("/cache/tree").json()["tiers"]["device"]["pages"]


@contextmanager
def tree_events(server: LiveServer) -> Iterator[list[dict[str, Any]]]:
    """Follows ``/cache/tree/events`` in one request; the list grows until that ends."""
    events: list[dict[str, Any]] = []

    def follow() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("GET", f"{server.base_url}/cache/tree/events", timeout=LIMIT_S) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    yield events
    assert thread.is_alive(), "the stream ended"


@pytest.mark.nightly
@pytest.mark.parametrize("n_kills", [1, 4])
def test_kills_under_load(start: Start, tmp_path: Path, n_kills: int) -> None:
    log, folder = tmp_path / "requests", tmp_path / "cache"
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
    flags = (*TIERS, "--cache-dir", str(folder), *event_flags(endpoints), "--request-log", str(log))
    with start("--restart-runtime", *flags) as server, following(endpoints, tmp_path) as subscriber:
        server.http.post("/cache/pin", json={"prompt": STORY})
        answer, _ = ask(server)
        server.complete(prompt=STORY.replace("hens", "geese"), max_tokens=1)  # is never asked for again
        wait_for(lambda: len(page_files(folder)) >= len(STORY) // 100, "nothing is written")
        loads = [{**body, "stream": stream} for body in (LONG, LONG, BRIEF) for stream in (False, True)]
        with tree_events(server) as tree, asking(server, *loads) as endings:
            for n_restarts in range(1, n_kills + 1):
                wait_for(lambda: server.metric("num_requests_running") >= 4, "nothing runs")
                kill_runtime(server)
                assert server.http.get("/ready").json() == {"status": "runtime_restarting"}
                refused = server.http.post("/v1/completions", json=BRIEF)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "runtime_restarting"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert server.http.get("/metrics").status_code == 503
                next_runtime(server)
                n_tree, n_complete = len(tree), endings.counts["complete"]
                wait_for(lambda: server.http.get("/health").status_code == 200, "not healthy again")
                assert server.http.get("/ready").status_code == 200
                again, cached = ask(server)
                assert again == answer
                assert cached["storage"] > 64
                assert cached["device"] == cached["host"] == 0
                wait_for(lambda n=n_complete: endings.counts["complete"] > n + 6, "nothing is answered again")
                assert server.metrics("runtime_restarts_total", "kv_pages_pinned") == [n_restarts, 0]
                wait_for(lambda n=n_tree: any("tiers" in event for event in tree[n:]), "no tree is sent again")
                assert any(event.get("type") == "restarting" for event in tree)
        assert endings.wrong() == set()
        assert set(endings.counts) == {"complete", *RUNTIME_CODES}
        wait_for(server.is_idle, "pages or requests are left")
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert len({entry["id"] for entry in entries}) == len(entries), "a request was sent twice, or ended twice"
        assert {entry["error"] for entry in entries} == {None, "runtime_died"}
        wait_for(lambda: subscriber.counts()["GPU"] == n_device_pages(server), "a dead runtime's pages are left")
        numbers = subscriber.numbers()
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a number came twice, or is missing"
        kill_runtime(server)
        next_runtime(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=LIMIT_S) == 0
        assert not is_running(server.runtime_pid)
    assert list(tmp_path.glob("radixkv-*")) == []


@pytest.mark.nightly
def test_a_runtime_that_dies_too_often_ends_the_server(sensitive: Path, tmp_path: Path) -> None:
    entry = [sys.executable, str(HERE / "brief_restarts_cli.py")]
    with serving(sensitive, tmp_path / "errors", "--restart-runtime", entry=entry) as server:
        kill_runtime(server)
        next_runtime(server)
        os.kill(server.runtime_pid, signal.SIGKILL)
        assert server.process.wait(timeout=LIMIT_S) == 1
        *_, last = (tmp_path / "errors").read_text().splitlines()
        assert "ended with code -9 before it was ready, after 1 restarts" in last
        assert last.endswith("; start the server again")
    assert list(tmp_path.glob("radixkv-*")) == []
