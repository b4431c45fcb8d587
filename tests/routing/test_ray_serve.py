"""The application of Ray Serve, with real replicas on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from routing.conftest import POOL_TOKENS, Start
from support.live import LIMIT_S, wait_for
from support.paths import ROOT
from support.routed_load import Load, Traffic, body, ending

pytestmark = pytest.mark.routing

NO_KEY: Mapping[str, str] = MappingProxyType({})
READY_LIMIT_S = 400.0
FLAGS = ("--model", "tiny", "--grammar-backend", "none", "--max-total-tokens", str(POOL_TOKENS))


def configuration(port: int, deployment: dict[str, object], **args: object) -> dict[str, object]:
    """Returns a configuration of Serve, whose actors reserve little of the processor if nothing else is given."""
    small: dict[str, object] = {"ray_actor_options": {"num_cpus": 0.01}}
    servers = {name: value for name, value in (small | deployment).items() if value is not None}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "radixkv",
                "route_prefix": "/",
                "import_path": "radixkv.ray_serve.application:build",
                "args": {"flags": list(FLAGS), **args},
                "deployments": [
                    {"name": "Server", **servers},
                    {"name": "Ingress", **small},
                ],
            }
        ],
    }


@contextmanager
def ray_serve(
    programs: Path,
    folder: Path,
    deployment: dict[str, object],
    key: Mapping[str, str] = NO_KEY,
    *,
    resources: Mapping[str, float] = MappingProxyType({}),
    refusal: str = "",
    **args: object,
) -> Iterator[str]:
    """Runs ``serve run`` on a Ray of its own; yields the address once the application answers.

    With ``resources`` Ray takes this machine to have those. With ``refusal`` it yields once the log has that text.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file, log = folder / "serve.yaml", folder / "serve.log"
    file.write_text(json.dumps(configuration(port, deployment, **args)))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    if resources:
        environment["RAY_OVERRIDE_RESOURCES"] = json.dumps(dict(resources))

    def run() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(
                [programs / "serve", "run", file], stdout=output, stderr=output, env=environment
            )

    address = f"http://127.0.0.1:{port}"
    process = run()

    def is_ready() -> bool:
        nonlocal process
        if process.poll() is not None:
            # Ray gives its own processes 30 s to start. A busy machine may need longer.
            assert "timed out during startup" in log.read_text(), log.read_text()[-3000:]
            process = run()
        if refusal:
            return refusal in log.read_text()
        try:
            return httpx.get(f"{address}/v1/models", headers=key, timeout=LIMIT_S).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_ready, f"Ray Serve is not ready, see {log}", READY_LIMIT_S)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=LIMIT_S)
        finally:
            process.kill()


def server_pids() -> list[int]:
    """Returns the processes ``radixkv serve`` with the flags of the application, without their runtimes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[1:5] == [b"-m", b"radixkv.cli", b"serve", b"--model"] and str(POOL_TOKENS).encode() in words:
            found.append(int(folder.name))
    return sorted(found)


def test_replicas_are_asked_lost_and_replaced(programs: Path, tmp_path: Path, start: Start, load: Load) -> None:
    with ray_serve(programs, tmp_path, {"num_replicas": 2}, probe_timeout_s=20) as address:
        wait_for(lambda: len(server_pids()) == 2, "there are not two servers")
        routed = load.hit_rate([address])

        # A conversation stays where it is, to the token.
        prompt = load.turns[4][3] + " and a text that is new"
        for n_cached in (None, len(prompt.split()) // 2):
            usage = httpx.post(f"{address}/v1/completions", json=body(prompt), timeout=LIMIT_S).json()["usage"]
            assert n_cached is None or usage["prompt_tokens_details"]["cached_tokens"] > n_cached
        _check_errors(address)

        # The process of a server is killed under load.
        traffic = Traffic(address, load.turns[1])
        wait_for(lambda: traffic.endings["complete"] > 12, "no request ends")
        victim = server_pids()[0]
        os.kill(victim, signal.SIGKILL)
        time.sleep(10)
        endings = traffic.stop()
        assert endings.keys() <= {"complete", "error"}, endings
        assert endings["error"] <= 6, "at most what was in flight there"
        assert endings["complete"] > 20
        wait_for(lambda: len(server_pids()) == 2 and victim not in server_pids(), "the server is not replaced")
        assert [ending(address, prompt, stream=True) for prompt in load.turns[0]] == ["complete"] * 13
    wait_for(lambda: not server_pids(), "a server outlives Ray Serve")
    servers = [start() for _ in range(2)]
    round_robin = load.hit_rate([server.base_url for server in servers])
    pooled = load.hit_rate([start(2 * POOL_TOKENS).base_url])
    print(f"Ray Serve {routed:.3f}, round robin {round_robin:.3f}, one pool {pooled:.3f}; killed: {endings}")
    assert routed >= 0.85 * pooled
    assert routed >= 1.2 * round_robin


def _check_errors(address: str) -> None:
    """Checks replies to wrong requests, which look like those of a server."""
    wrong = httpx.post(f"{address}/v1/completions", json={"prompt": 5}, timeout=LIMIT_S)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    assert httpx.get(f"{address}/metrics").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{address}/v1/models", headers={"Origin": "http://a.example"}).status_code == 403
    assert httpx.get(f"{address}/health").json() == {}
    too_long = httpx.post(f"{address}/v1/completions", content=b" " * (9 << 20), timeout=LIMIT_S)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "body_too_large")


def test_load_adds_a_replica_and_clients_need_the_key(programs: Path, tmp_path: Path, load: Load) -> None:
    file, key = tmp_path / "key", {"Authorization": "Bearer secret"}
    file.write_text("secret\n")
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1}
    scaling |= {"downscale_delay_s": 600, "metrics_interval_s": 1, "look_back_period_s": 2}
    deployment: dict[str, object] = {"autoscaling_config": scaling}
    with ray_serve(programs, tmp_path, deployment, key=key, api_key_file=str(file)) as address:
        assert httpx.get(f"{address}/v1/models", timeout=LIMIT_S).status_code == 401
        refused = httpx.post(f"{address}/v1/load_lora_adapter", json={}, headers=key, timeout=LIMIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_feature")
        assert "--lora-modules" in refused.json()["error"]["message"]
        assert len(server_pids()) == 1
        deadline = time.monotonic() + READY_LIMIT_S
        while len(server_pids()) < 2:
            assert time.monotonic() < deadline, "no replica is added"
            load.hit_rate([address], key="secret", concurrency=16)
        added = max(server_pids())
        wait_for(lambda: bool(listening_ports(added)), "the new server is not ready")
        metrics = f"http://{address_of_this_node()}:{listening_ports(added)[0]}/metrics"
        deadline = time.monotonic() + READY_LIMIT_S
        while not n_prompt_tokens(metrics, key):
            assert time.monotonic() < deadline, "the new server gets nothing"
            Load(n_sessions=60, n_turns=1).hit_rate([address], key="secret", concurrency=16)


def n_prompt_tokens(metrics: str, key: Mapping[str, str]) -> float:
    found = re.search(
        r"^radixkv:prompt_tokens_total (\S+)$", httpx.get(metrics, headers=key, timeout=LIMIT_S).text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def listening_ports(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens."""
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]


def address_of_this_node() -> str:
    """Returns the address that Ray has: that of the way to other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 80))
        return str(probe.getsockname()[0])


def test_ranks_take_a_gpu_each(programs: Path, tmp_path: Path) -> None:
    """Ray is told of two GPUs that are none, so the ranks compute on the CPU."""
    ranks = [*FLAGS, "--tensor-parallel-size", "2"]
    asks_by_itself: dict[str, object] = {"num_replicas": 1, "ray_actor_options": None}
    with ray_serve(programs, tmp_path, asks_by_itself, resources={"CPU": 4, "GPU": 2}, flags=ranks) as address:
        (pid,) = server_pids()
        assert b"CUDA_VISIBLE_DEVICES=0,1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert ending(address, "Hello there", stream=False) == "complete"


def test_ranks_without_gpus_are_refused(programs: Path, tmp_path: Path) -> None:
    ranks = [*FLAGS, "--tensor-parallel-size", "2"]
    refusal = "tensor_parallel_size 2 needs 2 GPUs, and a replica of the deployment Server has 0;"
    with ray_serve(programs, tmp_path, {"num_replicas": 1}, refusal=refusal, flags=ranks):
        assert not server_pids()
