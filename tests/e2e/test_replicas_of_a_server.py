"""A server with several runtimes: where prompts go, what it shows, and what becomes of a death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.live import LiveServer, serving

Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture(scope="module")
def replicas(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    errors = tmp_path_factory.mktemp("replicas") / "errors"
    with serving(sensitive, errors, "--device", "cpu", "--data-parallel-size", "2") as live:
        yield live


def of_each(live: LiveServer, name: str) -> list[float]:
    """Returns the values of a metric of each replica."""
    return live.metrics(*(f'replica_{name}{{replica="{index}"}}' for index in range(2)))


def n_placed_by_prefix(live: LiveServer) -> float:
    labels = [f'{{reason="{why}",replica="{index}"}}' for index in range(2) for why in ("prefix", "recent")]
    return sum(live.metrics(*(f"replica_placements_total{each}" for each in labels)))


def test_prompts_that_begin_alike_share_the_cache_of_one_replica(replicas: LiveServer) -> None:
    before, n_placed = of_each(replicas, "prefix_cache_hits_total"), n_placed_by_prefix(replicas)
    for n in range(6):
        replicas.complete(prompt=[*range(1, 100), 200 + n], max_tokens=2)
    gained = [
        after - earlier for after, earlier in zip(of_each(replicas, "prefix_cache_hits_total"), before, strict=True)
    ]
    assert sorted(gained) == [0, 5 * 96], "one has them all"
    assert n_placed_by_prefix(replicas) == n_placed + 5


def test_other_prompts_use_both(replicas: LiveServer) -> None:
    before = of_each(replicas, "prefix_cache_queries_total")
    for n in range(8):
        replicas.complete(prompt=[300 + n] * 64, max_tokens=2)
    after = of_each(replicas, "prefix_cache_queries_total")
    assert all(now > earlier for now, earlier in zip(after, before, strict=True))


@pytest.mark.nightly
def test_answers_are_those_of_one_runtime(replicas: LiveServer, server: LiveServer) -> None:
    fields = {"prompt": [[n] * 40 for n in range(1, 7)], "max_tokens": 12, "temperature": 0.8, "seed": 3}
    texts = [[choice["text"] for choice in live.complete(**fields)["choices"]] for live in (replicas, server)]
    assert texts[0] == texts[1]


def test_routes_of_the_cache_speak_for_all_replicas(replicas: LiveServer) -> None:
    prompts = [[400 + n] * 64 for n in range(6)]
    for prompt in prompts:
        replicas.complete(prompt=prompt, max_tokens=1)
    match = replicas.http.post("/cache/match", json={"prompt": prompts}).json()
    assert [one["matched_tokens"]["device"] for one in match["prompts"]] == [64] * 6
    for prompt in prompts:
        explained = replicas.http.post("/cache/explain", json={"prompt": prompt}).json()
        assert explained["cached_tokens"] == 63
    tree = replicas.http.get("/cache/tree").json()
    assert tree["tiers"]["device"]["capacity"] == 2 * replicas.n_pages
    pinned = replicas.http.post("/cache/pin", json={"prompt": prompts[0], "ttl": "5m"}).json()
    assert pinned["pinned_tokens"] == 64
    replicas.http.post("/flush_cache")
    match = replicas.http.post("/cache/match", json={"prompt": prompts}).json()
    assert [one["matched_tokens"]["device"] for one in match["prompts"]] == [0] * 6


def test_the_pool_of_server_info_is_that_of_one_replica_as_in_sglang(replicas: LiveServer) -> None:
    info = replicas.http.get("/server_info").json()
    n_tokens = replicas.n_pages * info["page_size"]
    assert info["max_total_num_tokens"] == n_tokens
    (load,) = replicas.http.get("/v1/loads").json()["loads"]
    assert load["max_total_num_tokens"] == 2 * n_tokens


@pytest.mark.nightly
def test_a_replica_that_is_killed_is_started_again(start: Start) -> None:
    with start("--device", "cpu", "--data-parallel-size", "2") as live:
        os.kill(live.runtime_pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while live.metric("runtime_restarts_total") < 1:
            assert live.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] == 2
            assert live.http.get("/health").status_code == 200
            assert time.monotonic() < deadline
        assert of_each(live, "up") == [1, 1]
        assert sorted(of_each(live, "restarts_total")) == [0, 1]
