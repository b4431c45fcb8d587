"""Servers behind smg, which gets nothing but their addresses."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from routing.conftest import POOL_TOKENS, Start
from support.live import LIMIT_S, LiveServer, wait_for
from support.routed_load import Load, Traffic, ending

pytestmark = pytest.mark.routing


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def smg(programs: Path, log: Path, servers: Sequence[LiveServer], policy: str) -> Iterator[str]:
    """Runs smg before these servers; yields its address."""
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--prometheus-port", str(free_port())]
    flags += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    flags += ["--worker-startup-check-interval", "1", "--worker-urls", *(server.base_url for server in servers)]
    with log.open("w") as output:
        process = subprocess.Popen([programs / "smg", "launch", *flags], stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: n_ready(address) == len(servers), f"smg is not ready: {log.read_text()[-2000:]}")
        yield address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=LIMIT_S)


def n_ready(address: str) -> int:
    try:
        workers = httpx.get(f"{address}/workers").json()["workers"]
    except httpx.TransportError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)


def test_hits_are_near_those_of_one_pool_and_far_above_round_robin(
    programs: Path, tmp_path: Path, start: Start, load: Load
) -> None:
    servers = [start() for _ in range(3)]
    with smg(programs, tmp_path / "smg.log", servers, "cache_aware") as address:
        routed = load.hit_rate([address])
    for server in servers:
        server.http.post("/flush_cache")
    round_robin = load.hit_rate([server.base_url for server in servers])
    pooled = load.hit_rate([start(3 * POOL_TOKENS).base_url])
    print(f"smg {routed:.3f}, round robin {round_robin:.3f}, one pool {pooled:.3f}")
    assert routed >= 0.85 * pooled
    assert routed >= 1.2 * round_robin


def test_a_server_that_is_killed_costs_its_own_requests_only(
    programs: Path, tmp_path: Path, start: Start, load: Load
) -> None:
    servers = [start() for _ in range(2)]
    with smg(programs, tmp_path / "smg.log", servers, "cache_aware") as address:
        traffic = Traffic(address, load.turns[1])
        wait_for(lambda: traffic.endings["complete"] > 12, "no request ends")
        wait_for(lambda: servers[0].metric("num_requests_running") > 0, "the server has no requests")
        servers[0].process.kill()
        time.sleep(6)
        endings = traffic.stop()
        assert endings.pop("complete") > 20
        # smg passes the broken connection of a stream on: the client sees that the stream has no end.
        lost = sum(endings.values())
        assert lost <= 12, endings
        assert all(how == "error" or how.startswith(("connection lost", "no end")) for how in endings), endings
        assert [ending(address, prompt, stream=False) for prompt in load.turns[0]] == ["complete"] * 13


def test_a_server_that_is_added_gets_requests(programs: Path, tmp_path: Path, start: Start, load: Load) -> None:
    servers = [start() for _ in range(2)]
    with smg(programs, tmp_path / "smg.log", servers, "cache_aware") as address:
        load.hit_rate([address])
        added = start()
        httpx.post(f"{address}/workers", json={"url": added.base_url}).raise_for_status()
        wait_for(lambda: n_ready(address) == 3, "smg does not find the new server")
        Load(n_sessions=30, n_turns=1).hit_rate([address])
        assert added.metric("prompt_tokens_total") > 0
