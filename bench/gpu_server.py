"""Runs few-shot prompts and chats by many HTTP clients, with dummy weights of the shape of Llama 3.1 8B.

A server with the prefix cache and one without each answer two workloads of `radixkv bench`, with 256 requests in
flight. The clients are spread over processes, because one process could not read as many streams in time. Prints a
table and appends a JSON line per run, with time to first token, time between tokens and throughput as the clients
see them. The tokenizer is the embedded model's: most ids that the dummy model generates are not in it, so answers
have no text.

    python bench/gpu_server.py --output-file bench/results/gpu_server.jsonl
    python bench/gpu_server.py --small --device cpu      # tries the code
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
from result_lines import add_gpu_flags, append, script_parser
from shapes import LLAMA_8B, SMALL, write_model

from gpu import gpu_provenance
from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.client import OpenAIClient
from radixkv.bench.load.generator import LoadGenerator
from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.report.run_metrics import run_metrics
from radixkv.bench.run import Benchmark
from radixkv.bench.server_process import running_server
from radixkv.bench.workloads.catalog import WorkloadOverrides, load_workload, warmup_sessions

Cache = Literal["on", "off"]
WORKLOADS: Mapping[str, Mapping[str, int]] = {
    "fewshot": {"num_prompts": 768, "num_shots": 9, "output_len": 32, "max_concurrency": 256},
    "multiturn": {"num_sessions": 256, "num_turns": 3, "num_shots": 3, "output_len": 64, "max_concurrency": 256},
    "pressure": {
        "num_sessions": 160,
        "num_facts": 220,
        "num_questions": 6,
        "output_len": 64,
        "max_concurrency": 32,
    },
}
"""Prompts of about 980 tokens, 910 of them shared; chats of about 460 tokens; and chats that grow to 3,000 tokens,
480,000 together, for a pool of 131,072 (``--flag=--max-total-tokens=131072``)."""
SMALL_WORKLOADS: Mapping[str, Mapping[str, int]] = {
    "fewshot": {"num_prompts": 12, "num_shots": 2, "output_len": 4, "max_concurrency": 4},
    "multiturn": {"num_sessions": 4, "num_turns": 2, "num_shots": 1, "output_len": 4, "max_concurrency": 4},
    "pressure": {"num_sessions": 6, "num_turns": 2, "num_facts": 8, "output_len": 4, "max_concurrency": 4},
}
HEADER = (
    f"{'workload':<10} {'cache':<5} {'seconds':>8} {'req/s':>7} {'out tok/s':>9} {'TTFT ms':>8} {'p99':>8} "
    f"{'return':>8} {'ITL ms':>7} {'p99':>7} {'hits %':>6} {'optimum':>7}"
)


async def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--workloads", default="fewshot,multiturn", metavar="NAMES", help="comma-separated")
    parser.add_argument("--cache", choices=("both", "on", "off"), default="both")
    parser.add_argument("--processes", type=int, default=4, metavar="COUNT", help="processes of the clients")
    parser.add_argument("--small", action="store_true", help="a small model and small workloads")
    parser.add_argument(
        "--flag", action="append", default=[], metavar="FLAG=VALUE", help="more flags of the server"
    )
    arguments = parser.parse_args()
    benches = [load_benchmark(name, is_small=arguments.small) for name in arguments.workloads.split(",")]
    about = gpu_provenance(arguments.device, arguments.commit)
    caches: tuple[Cache, ...] = ("on", "off") if arguments.cache == "both" else (arguments.cache,)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SMALL if arguments.small else LLAMA_8B, Path(folder))
        print(HEADER, flush=True)
        for cache in caches:
            begun = time.perf_counter()
            async with running_server([*flags(model, arguments.device, cache), *arguments.flag]) as address:
                ready_s = round(time.perf_counter() - begun, 1)
                for bench in benches:
                    line = await measure(bench, address, arguments.processes, is_small=arguments.small)
                    line |= {
                        "cache": cache,
                        "mode": "server",
                        "server_flags": " ".join(arguments.flag),
                        "ready_s": ready_s,
                        **about,
                    }
                    print(row(line), flush=True)
                    append(arguments.output_file, line)


def load_benchmark(name: str, *, is_small: bool) -> Benchmark:
    sizes = (SMALL_WORKLOADS if is_small else WORKLOADS)[name]
    return Benchmark.make(name, load_workload(name, WorkloadOverrides(**sizes)))


async def measure(bench: Benchmark, address: str, n_processes: int, *, is_small: bool) -> dict[str, Any]:
    """Runs the workload from a cold cache with all clients. Returns the result line."""
    async with OpenAIClient(address) as client:
        model = await client.model()
        await LoadGenerator(client).run(warmup_sessions(8, seed=0, output_len=8), Load(model, max_concurrency=8))
        flushed = await client.flush() is not None
    load = Load(model, max_concurrency=bench.workload.max_concurrency // n_processes)
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.5] * n_processes))  # until all processes have started
        shares = [SessionShare(bench.name, is_small, address, load, i, n_processes) for i in range(n_processes)]
        records = [record for answers in pool.map(run_share, shares) for record in answers]
    if failed := {record.error for record in records if record.error is not None}:
        raise SystemExit(f"{bench.name}: requests failed: {sorted(failed)[:3]}")
    records.sort(key=lambda record: (record.session, record.turn))
    began = min(record.started for record in records)
    duration = max(record.started + record.latency for record in records) - began
    metrics = run_metrics(Measurement(records, duration, began))
    del metrics["accuracy_pct"], metrics["n_checked"]  # dummy weights
    return {
        "workload": bench.name,
        "num_prompts": len(records),
        **msgspec.structs.asdict(bench.workload),
        "cache_flushed": flushed,
        "client_processes": n_processes,
        **metrics,
    }


@dataclass(frozen=True)
class SessionShare:
    """The sessions of a workload that one process sends: every ``step``-th from ``first`` on."""

    name: str
    is_small: bool
    address: str
    load: Load
    first: int
    step: int


def run_share(share: SessionShare) -> list[Record]:
    """Runs a share of the sessions. They cannot be sent to a process, so they are generated again."""
    sessions = load_benchmark(share.name, is_small=share.is_small).sessions[share.first :: share.step]

    async def run_sessions() -> Measurement:
        async with OpenAIClient(share.address) as client:
            return await LoadGenerator(client).run(sessions, share.load)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(run_sessions()).records
    for record in records:
        record.session = share.first + record.session * share.step
    return list(records)


def flags(model: Path, device: str, cache: Cache) -> list[str]:
    fixed = [f"--model={model}", "--served-model-name=dummy", "--load-format=dummy", "--tokenizer=tiny"]
    fixed += ["--dtype=bfloat16", f"--device={device}"]
    return fixed if cache == "on" else [*fixed, "--no-enable-prefix-caching"]


def row(line: Mapping[str, Any]) -> str:
    report = line["cache_report"]
    return (
        f"{line['workload']:<10} {line['cache']:<5} {line['duration']:>8.2f} {line['request_throughput']:>7.1f} "
        f"{line['output_throughput']:>9.0f} {number(line['mean_ttft_ms']):>8} {number(line['p99_ttft_ms']):>8} "
        f"{number(line['mean_returning_ttft_ms']):>8} "
        f"{number(line['mean_itl_ms']):>7} {number(line['p99_itl_ms']):>7} "
        f"{number(report['cache_hit_rate_pct']):>6} {number(report['optimum_pct']):>7}"
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    asyncio.run(main())
