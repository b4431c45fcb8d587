"""Two servers of one machine that share a store, beside one server with twice the pool: hits, and tokens a second.

``agents`` sends the sessions of the workload to the servers in turn, request by request, whichever server has
seen the session before. ``hits`` asks one server about documents that only its host tier has, and another one about
documents that only the store has, one request at a time. Each is asked twice about all of them, since memory is
slow when it is first used. The faster round counts.

    python bench/shared_servers.py --output-file bench/results/shared_servers.jsonl
    python bench/shared_servers.py --stores none shm file disk s3://BUCKET/PREFIX mooncake://HOST:PORT --rounds 3

Prints a JSON line for each store and round. ``one`` is one server with twice the pool and twice the host tier;
``none`` are two servers without a store. ``shm`` and ``file`` are in ``/dev/shm``, ``disk`` is a folder in the
system's folder for temporary files, read from the kernel's page cache mostly; all three are removed afterwards. A
store that is given by its URL gets pages under another prefix in each round, and keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
from result_lines import about_stores, add_beside_flag, report, script_parser

from radixkv.client.http import HTTPClient
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.load.record import Record
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.lab.bench.workloads.agents import Agents
from radixkv.lab.bench.workloads.base import Source
from radixkv.processes.server_process import running_server

NAME = "radixkv-bench"
SHARED = Path("/dev/shm")
DISK = Path(tempfile.gettempdir())
DOCUMENT_TOKENS = 1168
N_DOCUMENTS = 8
MIB = 1 << 20


class InTurn(OpenAIClient):
    """Sends each request to the next one of several servers.

    Args:
        clients: of the servers.
    """

    def __init__(self, clients: list[OpenAIClient]) -> None:
        super().__init__(clients[0].address)
        self._clients = itertools.cycle(clients)

    async def send(self, path: str, body: bytes, record: Record, *, n_choices: int = 1) -> None:
        """See ``OpenAIClient``."""
        await next(self._clients).send(path, body, record, n_choices=n_choices)


def store_url(store: str, n_bytes: int) -> str | None:
    """Returns the ``--cache-url`` of a store; None: there is none."""
    if store in ("one", "none"):
        return None
    known = {
        "shm": f"shm://{NAME}?size={n_bytes}",
        "file": f"file://{SHARED / NAME}",
        "disk": f"file://{DISK / NAME}",
    }
    return known.get(store) or f"{store.rstrip('/')}/{NAME}-{time.time_ns()}"


def remove_stores() -> None:
    """Removes what ``shm``, ``file`` and ``disk`` leave."""
    (SHARED / f"radixkv-{os.getuid()}-{NAME}").unlink(missing_ok=True)
    for folder in (SHARED, DISK):
        shutil.rmtree(folder / NAME, ignore_errors=True)


def flags(args: argparse.Namespace, store: str, *, factor: int = 1, pool_tokens: int | None = None) -> list[str]:
    """Returns the flags of a server."""
    url = store_url(store, args.store_mebibytes * MIB)
    return [
        *(args.model, "--dtype", "float32", "--grammar-backend", "none", "--max-num-seqs", "8"),
        *("--max-total-tokens", str(pool_tokens or factor * args.pool_tokens)),
        *("--host-memory", f"{factor * args.host_mebibytes}MiB"),
        *(() if url is None else ("--cache-url", url)),
    ]


async def metrics(client: HTTPClient) -> dict[str, float]:
    """Returns the counters of a server that have no labels."""
    text = (await client.request("GET", "/metrics", limit_s=60.0)).decode()
    return {name: float(value) for name, value in re.findall(r"^radixkv:(\w+) (\S+)$", text, re.MULTILINE)}


def per_page(counters: list[dict[str, float]], kind: str, seconds: str) -> float | None:
    """Returns the microseconds of a page that was copied, None if none was."""
    n_pages = sum(one.get(f"{kind}_total", 0) for one in counters)
    total_s = sum(one.get(f"{seconds}_total", 0) for one in counters)
    return round(1e6 * total_s / n_pages, 1) if n_pages else None


async def run_agents(args: argparse.Namespace, store: str, seed: int) -> dict[str, Any]:
    """Measures the workload."""
    async with AsyncExitStack() as stack:
        n_servers = 1 if store == "one" else 2
        environment = {"OMP_NUM_THREADS": str(2 // n_servers)}
        command = flags(args, store, factor=3 - n_servers)
        addresses = [
            await stack.enter_async_context(running_server(command, environment=environment))
            for _ in range(n_servers)
        ]
        clients = [await stack.enter_async_context(OpenAIClient(address)) for address in addresses]
        workload = Agents(num_sessions=args.sessions, num_turns=args.turns, num_shots=args.shots)
        sessions = workload.make(Source(seed=seed)).sessions
        load = Load(model=await clients[0].model(), max_concurrency=args.concurrency)
        measured = await LoadGenerator(InTurn(clients)).run(sessions, load)
        counters = [await metrics(client) for client in clients]
    records = [record for record in measured.records if record.error is None]
    n_prompt, n_output = (sum(getattr(one, f"n_{kind}_tokens") for one in records) for kind in ("prompt", "output"))
    ttft = sorted(one.ttft for one in records if one.choices)
    return {
        "requests": len(records),
        "failed": len(measured.records) - len(records),
        "hits_pct": round(100 * sum(one.n_cached_tokens or 0 for one in records) / n_prompt, 2),
        "prompt_tokens": n_prompt,
        "output_tokens_per_s": round(n_output / measured.duration, 1),
        "requests_per_s": round(len(records) / measured.duration, 2),
        "ttft_p50_s": round(percentile(ttft, 50) or 0.0, 4),
        "ttft_p90_s": round(percentile(ttft, 90) or 0.0, 4),
        "store_hits_pct": round(
            100 * sum(one.get("store_prefix_cache_hits_total", 0) for one in counters) / n_prompt, 2
        ),
        "us_per_page_loaded": per_page(counters, "host_pages_loaded", "host_load_seconds"),
        "us_per_page_fetched": per_page(counters, "store_pages_fetched", "store_fetch_seconds"),
        "pages_missed": sum(one.get("store_pages_missed_total", 0) for one in counters),
    }


async def run_hits(args: argparse.Namespace, store: str, seed: int) -> dict[str, Any]:
    """Measures the time of a request whose prompt is computed, loaded from the host tier, or from the store."""
    random = Random(seed)
    documents = [[random.randrange(3, 400) for _ in range(DOCUMENT_TOKENS + 1)] for _ in range(N_DOCUMENTS)]
    command = [*flags(args, store, pool_tokens=2 * DOCUMENT_TOKENS), "--load-policy", "always"]
    async with AsyncExitStack() as stack:
        seconds: list[float] = []
        clients: list[HTTPClient] = []
        for _ in range(2):
            address = await stack.enter_async_context(running_server(command, environment={"OMP_NUM_THREADS": "1"}))
            clients.append(await stack.enter_async_context(HTTPClient(address)))
        model = msgspec.json.decode(await clients[0].request("GET", "/v1/models", limit_s=60.0))["data"][0]["id"]

        async def ask_all(client: HTTPClient) -> float:
            times = []
            for document in documents:
                body = {"model": model, "prompt": document, "max_tokens": 1, "temperature": 0}
                started = time.perf_counter()
                await client.request("POST", "/v1/completions", msgspec.json.encode(body), limit_s=60.0)
                times.append(time.perf_counter() - started)
            return median(times)

        await clients[1].request(
            "POST",
            "/v1/completions",
            msgspec.json.encode({"model": model, "prompt": documents[0][::-1], "max_tokens": 1}),
            limit_s=60.0,
        )
        for client in (clients[0], clients[0], clients[0], clients[1], clients[1]):
            if client is clients[1]:
                await client.request("POST", "/flush_cache", limit_s=60.0)  # of its own tiers, not of the store
            seconds.append(await ask_all(client))
            await asyncio.sleep(1.0)
        counters = [await metrics(client) for client in clients]
    return {
        "prompt_tokens": DOCUMENT_TOKENS + 1,
        "computed_s": round(seconds[0], 5),
        "from_host_s": round(min(seconds[1:3]), 5),
        "from_store_s": round(min(seconds[3:]), 5),
        "store_hits_pct": round(
            100 * counters[1]["store_prefix_cache_hits_total"] / (2 * N_DOCUMENTS * (DOCUMENT_TOKENS + 1)), 2
        ),
        "us_per_page_loaded": per_page(counters[:1], "host_pages_loaded", "host_load_seconds"),
        "us_per_page_fetched": per_page(counters[1:], "store_pages_fetched", "store_fetch_seconds"),
    }


async def main() -> None:
    """Measures the stores in turn, as often as asked."""
    parser = script_parser(__doc__)
    add_beside_flag(parser)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--stores", nargs="+", default=["one", "none", "shm", "file"], metavar="STORE")
    parser.add_argument("--modes", nargs="+", choices=("agents", "hits"), default=["agents", "hits"])
    parser.add_argument("--rounds", type=int, default=1, help="of all stores, in turn")
    parser.add_argument("--pool-tokens", type=int, default=12_288, help="of each of two servers")
    parser.add_argument("--host-mebibytes", type=int, default=64, help="of each of two servers")
    parser.add_argument("--store-mebibytes", type=int, default=1024)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--shots", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    about = about_stores(args.beside)
    left_out = ("output_file", "stores", "modes", "beside")
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    for seed, store, mode in itertools.product(range(1, args.rounds + 1), args.stores, args.modes):
        if mode == "hits" and store in ("one", "none"):
            continue
        remove_stores()
        try:
            line = await (run_agents if mode == "agents" else run_hits)(args, store, seed)
        finally:
            remove_stores()
        about_line = {"benchmark": "shared_servers", "mode": mode, "store": store.partition(":")[0], "seed": seed}
        report(args.output_file, {**about_line, **line, "settings": settings}, about)


if __name__ == "__main__":
    asyncio.run(main())
