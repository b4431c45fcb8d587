"""Few-shot prompts and chats by many clients over HTTP, on dummy weights of the shape of Llama 3.1 8B.

One server with the prefix cache, one without; each answers both workloads of `radixkv bench` with 256 requests in
flight at once. The clients are spread over processes, because one could not read so many streams in time. Prints a
table and appends a JSON line a run, with time to first token, time between tokens and throughput as clients see
them. The tokenizer is the embedded model's: the dummy model's answers are mostly ids that it does not have, and so
no text.

    python bench/gpu_server.py --output-file bench/results/gpu_server.jsonl
    python bench/gpu_server.py --small --device cpu      # tries the code
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
from engine import write
from gpu_environment import gpu_environment
from shapes import LLAMA_8B, SMALL, write_model

from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.client import Client
from radixkv.bench.load.generator import LoadGenerator
from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.report.run_metrics import figures
from radixkv.bench.run import Bench
from radixkv.bench.server_process import started_server
from radixkv.bench.workloads.catalog import WorkloadChanges, load_workload, warmup_sessions

Cache = Literal["on", "off"]
WORKLOADS: Mapping[str, Mapping[str, int]] = {
    "fewshot": {"num_prompts": 768, "num_shots": 9, "output_len": 32, "max_concurrency": 256},
    "multiturn": {"num_sessions": 256, "num_turns": 3, "num_shots": 3, "output_len": 64, "max_concurrency": 256},
}
"""About 980 tokens a prompt, 910 of them shared; and chats of about 460."""
SMALL_WORKLOADS: Mapping[str, Mapping[str, int]] = {
    "fewshot": {"num_prompts": 12, "num_shots": 2, "output_len": 4, "max_concurrency": 4},
    "multiturn": {"num_sessions": 4, "num_turns": 2, "num_shots": 1, "output_len": 4, "max_concurrency": 4},
}
HEADER = (
    f"{'workload':<10} {'cache':<5} {'seconds':>8} {'req/s':>7} {'out tok/s':>9} {'TTFT ms':>8} {'p99':>8} "
    f"{'ITL ms':>7} {'p99':>7} {'hits %':>6} {'optimum':>7}"
)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="fewshot,multiturn", metavar="NAMES", help="comma-separated")
    parser.add_argument("--cache", choices=("both", "on", "off"), default="both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--processes", type=int, default=4, metavar="COUNT", help="that the clients are spread over"
    )
    parser.add_argument("--small", action="store_true", help="a small model and small workloads")
    parser.add_argument(
        "--flag", action="append", default=[], metavar="FLAG=VALUE", help="more flags of the server"
    )
    parser.add_argument("--commit", help="what is checked out, where there is no .git")
    parser.add_argument("--output-file", type=Path)
    arguments = parser.parse_args()
    benches = [made(name, is_small=arguments.small) for name in arguments.workloads.split(",")]
    environment = gpu_environment(arguments.device, arguments.commit)
    caches: tuple[Cache, ...] = ("on", "off") if arguments.cache == "both" else (arguments.cache,)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SMALL if arguments.small else LLAMA_8B, Path(folder))
        print(HEADER, flush=True)
        for cache in caches:
            begun = time.perf_counter()
            async with started_server([*flags(model, arguments.device, cache), *arguments.flag]) as address:
                ready_s = round(time.perf_counter() - begun, 1)
                for bench in benches:
                    line = await measured(bench, address, arguments.processes, is_small=arguments.small)
                    line |= {"cache": cache, "mode": "server", "ready_s": ready_s, "environment": environment}
                    print(row(line), flush=True)
                    write(arguments.output_file, line)


def made(name: str, *, is_small: bool) -> Bench:
    sizes = (SMALL_WORKLOADS if is_small else WORKLOADS)[name]
    return Bench.make(name, load_workload(name, WorkloadChanges(**sizes)))


async def measured(bench: Bench, address: str, n_processes: int, *, is_small: bool) -> dict[str, Any]:
    """The workload from a cold cache, by all clients at once."""
    async with Client(address) as client:
        model = await client.model()
        await LoadGenerator(client).run(warmup_sessions(8, seed=0, output_len=8), Load(model, max_concurrency=8))
        flushed = await client.flush() is not None
    load = Load(model, max_concurrency=bench.workload.max_concurrency // n_processes)
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.5] * n_processes))  # until all of them are there
        parts = [Part(bench.name, is_small, address, load, i, n_processes) for i in range(n_processes)]
        records = [record for answers in pool.map(asked, parts) for record in answers]
    if failed := {record.error for record in records if record.error is not None}:
        raise SystemExit(f"{bench.name}: requests failed: {sorted(failed)[:3]}")
    records.sort(key=lambda record: (record.session, record.turn))
    began = min(record.started for record in records)
    duration = max(record.started + record.latency for record in records) - began
    found = figures(Measurement(records, duration, began))
    del found["accuracy_pct"], found["n_checked"]  # the weights are dummies
    return {
        "workload": bench.name,
        "num_prompts": len(records),
        **msgspec.structs.asdict(bench.workload),
        "cache_flushed": flushed,
        "client_processes": n_processes,
        "date": date.today().isoformat(),
        **found,
    }


@dataclass(frozen=True)
class Part:
    """Every so-manieth session of a workload, which one process sends."""

    name: str
    is_small: bool
    address: str
    load: Load
    first: int
    step: int


def asked(part: Part) -> list[Record]:
    """What the sessions met; they cannot be handed to a process, but are made the same again."""
    sessions = made(part.name, is_small=part.is_small).sessions[part.first :: part.step]

    async def ask() -> Measurement:
        async with Client(part.address) as client:
            return await LoadGenerator(client).run(sessions, part.load)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(ask()).records
    for record in records:
        record.session = part.first + record.session * part.step
    return list(records)


def flags(model: Path, device: str, cache: Cache) -> list[str]:
    fixed = [f"--model={model}", "--served-model-name=dummy", "--load-format=dummy", "--tokenizer=tiny"]
    fixed += ["--dtype=bfloat16", f"--device={device}"]
    return fixed if cache == "on" else [*fixed, "--no-enable-prefix-caching"]


def row(line: Mapping[str, Any]) -> str:
    report = line["cache_report"]
    return (
        f"{line['workload']:<10} {line['cache']:<5} {line['duration']:>8.2f} {line['request_throughput']:>7.1f} "
        f"{line['output_throughput']:>9.0f} {shown(line['mean_ttft_ms']):>8} {shown(line['p99_ttft_ms']):>8} "
        f"{shown(line['mean_itl_ms']):>7} {shown(line['p99_itl_ms']):>7} "
        f"{shown(report['cache_hit_rate_pct']):>6} {shown(report['optimum_pct']):>7}"
    )


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    asyncio.run(main())
