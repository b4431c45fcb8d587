"""Measures the hit rate of servers behind a router, beside one server, and one with the pool of all of them.

The servers run the embedded model on the CPU of this machine. `radixkv bench` sends the workload, with the flags
after `--`, such as `-- --num-sessions 24`. Routers are `replicas`, the runtimes of one server
(`--data-parallel-size`), smg with its policies `cache_aware` and `round_robin`, and the Ray Serve application; the
programs of the last two are in the environment that `make test-routing` makes.

Appends one JSON line for each: the hit rate, and for routers that rate as a percentage of the whole pool's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from result_lines import report, script_parser

from radixkv.client.errors import BadReply
from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.processes.server_process import running_server

START_LIMIT_S = 300.0
ROUTERS = ("replicas", "smg round_robin", "smg cache_aware", "ray")


def server_flags(n_tokens: int) -> list[str]:
    """Returns the flags of a server with a pool of so many tokens."""
    return ["--model", "tiny", "--grammar-backend", "none", "--max-total-tokens", str(n_tokens)]


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(command: Sequence[str | Path], ready_path: str, port: int) -> AsyncIterator[str]:
    """Runs a router until the end of the context; yields its address once a model is served there."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        address = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_LIMIT_S
            async with HTTPClient(address) as client:
                while True:
                    try:
                        await client.request("GET", ready_path, limit_s=5.0)
                        break
                    except BadReply:
                        if process.poll() is not None or time.monotonic() > deadline:
                            sys.exit(f"{command[0]} is not ready: {os.pread(log.fileno(), 4000, 0).decode()}")
                        await asyncio.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def routed(router: str, n_servers: int, pool_tokens: int, programs: Path) -> AsyncIterator[str]:
    """Runs servers behind a router; yields the router's address."""
    port = free_port()
    async with AsyncExitStack() as stack:
        if router == "replicas":
            flags = [*server_flags(pool_tokens), "--data-parallel-size", str(n_servers)]
            yield await stack.enter_async_context(running_server(flags))
            return
        if router == "ray":
            actor = {"ray_actor_options": {"num_cpus": 0.01}}
            application = {
                "name": "radixkv",
                "route_prefix": "/",
                "import_path": "radixkv.ray_serve.application:build",
                "args": {"flags": server_flags(pool_tokens)},
                "deployments": [
                    {"name": "Server", "num_replicas": n_servers, **actor},
                    {"name": "Ingress", **actor},
                ],
            }
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "serve.yaml"
            http = {"host": "127.0.0.1", "port": port}
            file.write_text(json.dumps({"http_options": http, "applications": [application]}))
            command: list[str | Path] = [programs / "serve", "run", file]
        else:
            urls = [
                await stack.enter_async_context(running_server(server_flags(pool_tokens))) for _ in range(n_servers)
            ]
            command = [programs / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--policy", router.split()[1], "--prometheus-port", str(free_port())]
            command += ["--worker-startup-check-interval", "1", "--worker-urls", *urls]
        address = await stack.enter_async_context(running(command, "/v1/models", port))
        if router != "ray":
            await asyncio.sleep(20.0)  # smg registers its workers one after another
        yield address


def measure(address: str, workload: str, bench_flags: Sequence[str]) -> dict[str, float]:
    """Runs the workload; returns its hit rate, and its requests by how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.jsonl"
        command = [sys.executable, "-m", "radixkv.cli", "bench", "--workload", workload, "--base-url", address]
        subprocess.run([*command, "--output-file", file, *bench_flags], check=True, stdout=subprocess.DEVNULL)
        (line,) = map(json.loads, file.read_text().splitlines())
    return {
        "hit_rate_pct": round(line["cache_report"]["cache_hit_rate_pct"], 3),
        "completed": line["completed"],
        "failed": line["failed"],
        "total_input_tokens": line["total_input_tokens"],
        "mean_ttft_ms": round(line["mean_ttft_ms"], 1),
    }


async def main() -> None:
    """Measures one server with one pool and with all, then each router."""
    parser = script_parser(__doc__)
    parser.add_argument("--programs", type=Path, default=Path(".venv/routing/bin"), help="folder of smg and serve")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--pool-tokens", type=int, default=2400, help="of each server (default: 2400)")
    parser.add_argument("--routers", type=lambda text: text.split(","), default=list(ROUTERS), metavar="NAME,...")
    parser.add_argument("--workload", default="agents", metavar="NAME")
    parser.add_argument("bench_flags", nargs="*", metavar="FLAG", help="flags of radixkv bench, after --")
    args = parser.parse_args()
    settings = {
        "bench": "routing",
        "workload": args.workload,
        "flags": args.bench_flags,
        "pool_tokens": args.pool_tokens,
    }
    for n_pools in (1, args.servers):
        async with running_server(server_flags(n_pools * args.pool_tokens)) as address:
            pooled = await asyncio.to_thread(measure, address, args.workload, args.bench_flags)
        report(
            args.output_file, {**settings, "router": None, "servers": 1, "pools": n_pools, **pooled}, provenance()
        )
    for router in args.routers:
        async with routed(router, args.servers, args.pool_tokens, args.programs) as address:
            found = await asyncio.to_thread(measure, address, args.workload, args.bench_flags)
        share = round(100 * found["hit_rate_pct"] / pooled["hit_rate_pct"], 2)
        line = {
            **settings,
            "router": router,
            "servers": args.servers,
            "pools": args.servers,
            **found,
            "of_one_pool_pct": share,
        }
        report(args.output_file, line, provenance())


if __name__ == "__main__":
    asyncio.run(main())
