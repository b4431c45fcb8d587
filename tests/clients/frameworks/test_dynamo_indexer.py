"""NVIDIA Dynamo's indexer follows the cache events of a server: how it scores prompts."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.checkpoints.embedded import embedded_folder
from support.client_scripts import ENVIRONMENTS
from support.live import LiveServer, serving, wait_for

pytestmark = pytest.mark.clients

PAGE_SIZE = 16
PROMPT = [5 + 7 * index % 300 for index in range(6 * PAGE_SIZE)]


class Indexer:
    """The indexer's HTTP API."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def register(self, instance: int, events: str, replays: str) -> None:
        body = {"instance_id": instance, "endpoint": events, "replay_endpoint": replays, "model_name": "m"}
        reply = self.http.post("/register", json=body | {"block_size": PAGE_SIZE, "dp_rank": 0})
        assert reply.is_success, reply.text

    def longest(self, tokens: list[int], tier: str = "gpu") -> dict[str, int]:
        """Returns the tokens that each instance has in a tier and those above it, if it has any."""
        found: Any = self.http.post("/query", json={"token_ids": tokens, "model_name": "m"}).json()["instances"]
        return {instance: tiers[tier] for instance, tiers in found.items() if tiers[tier]}


def free_ports(n_ports: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    python = ENVIRONMENTS / "frameworks" / "dynamo" / "bin" / "python"
    assert python.exists(), f"there is no {python}; run make {python.parents[1] / '.ready'}"
    (port,) = free_ports(1)
    command = [python, "-m", "dynamo.indexer", "--block-size", str(PAGE_SIZE), "--port", str(port)]
    with (tmp_path / "indexer").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
                wait_for(lambda: _is_healthy(http), "the indexer does not start")
                yield Indexer(http)
        finally:
            process.kill()


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.TransportError:
        return False


def ask(server: LiveServer, prompt: list[int], salt: str = "") -> None:
    server.complete(prompt=prompt, max_tokens=1, cache_salt=salt)


def test_the_indexer_scores_what_each_tier_has(indexer: Indexer, tmp_path: Path) -> None:
    events, replays = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replays}
    flags = ("--kv-events-config", json.dumps(config), "--host-memory", "64MiB", "--max-total-tokens", "1024")
    with serving(embedded_folder(), tmp_path / "errors", *flags) as server:
        indexer.register(1, events, replays)
        ask(server, PROMPT, salt="hers")
        ask(server, PROMPT[: 4 * PAGE_SIZE + 3])
        wait_for(lambda: indexer.longest(PROMPT) == {"1": 64}, "it does not score the whole pages")
        assert indexer.longest(PROMPT[:40]) == {"1": 32}
        assert indexer.longest([*PROMPT[:32], *range(7, 39)]) == {"1": 32}, "half of it"
        assert indexer.longest([9, *PROMPT]) == {}, "none of it"

        indexer.register(2, events, replays)  # late: it asks for a replay
        ask(server, PROMPT)
        wait_for(lambda: indexer.longest(PROMPT) == {"1": 96, "2": 96}, "the late instance lacks what came before")
        for first in range(12):
            ask(server, [5 + (11 * index + 13 * first * index) % 300 for index in range(8 * PAGE_SIZE)])
        (found,) = server.http.post("/cache/match", json={"prompt": PROMPT}).json()["prompts"]
        assert found["matched_tokens"] == {"device": 0, "host": 96}
        wait_for(lambda: indexer.longest(PROMPT) == {}, "evicted pages are scored")
        assert indexer.longest(PROMPT, "cpu") == {"1": 96, "2": 96}

        server.http.post("/flush_cache")
        wait_for(lambda: indexer.longest(PROMPT, "disk") == {}, "dropped pages are scored")
