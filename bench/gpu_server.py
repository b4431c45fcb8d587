"""Runs few-shot prompts and chats by many HTTP clients, with dummy weights of the shape of Llama 3.1 8B.

A server with the prefix cache and one without each answer two workloads of `radixkv bench`, with 256 requests in
flight. The clients are spread over processes, because one process could not read as many streams in time. Prints a
table and appends a JSON line per run, with time to first token, time between tokens and throughput as the clients
see them; of an own server also the processor time and memory of its processes, and what its replicas do from moment
to moment (`server_use.py`). The tokenizer is the embedded model's: most ids that the dummy model generates are not
in it, so answers have no text. Later prompts of chats have recorded answers, so that every server gets the same
prompts.

    python bench/gpu_server.py --output-file bench/results/gpu_server.jsonl
    python bench/gpu_server.py --small --device cpu      # tries the code
    python bench/gpu_server.py --saturation-pct 80       # then Poisson arrivals at 80% of that rate
    python bench/gpu_server.py --scale 2 --flag=--data-parallel-size=2      # twice the load, for two replicas

Another engine's server is asked by the same clients. This needs neither torch nor a GPU here, and with token ids as
prompts no tokenizer there:

    python bench/gpu_server.py --address 127.0.0.1:8000 --engine "vllm 0.24.0" --prompt-form tokens
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
from result_lines import add_gpu_flags, append, script_parser
from server_use import ServerUse, Timeline, memory

from radixkv.checkpoints.resolve import resolve_tokenizer
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.load.record import Measurement, Record
from radixkv.lab.bench.load.requests import PromptEncoder
from radixkv.lab.bench.report.run_metrics import run_metrics
from radixkv.lab.bench.run import Benchmark
from radixkv.lab.bench.workloads.catalog import load_workload, warmup_sessions
from radixkv.processes.server_process import running_server

Cache = Literal["on", "off"]
WORKLOADS: Mapping[str, Mapping[str, object]] = {
    "fewshot": {"num_prompts": 768, "num_shots": 9, "output_len": 32, "max_concurrency": 256},
    "multiturn": {
        "num_sessions": 256,
        "num_turns": 3,
        "num_shots": 3,
        "output_len": 64,
        "max_concurrency": 256,
        "history": "recorded",
    },
    "unshared": {"num_prompts": 384, "num_shots": 9, "output_len": 64, "max_concurrency": 128},
    "pressure": {
        "num_sessions": 160,
        "num_facts": 220,
        "num_questions": 6,
        "output_len": 64,
        "max_concurrency": 32,
    },
}
"""Prompts of about 980 tokens, 910 of them shared; chats of about 500 tokens; prompts of about 980 tokens, none
shared; and chats that grow to 3,000 tokens, 480,000 together, for a pool of 131,072
(``--flag=--max-total-tokens=131072``)."""
SMALL_WORKLOADS: Mapping[str, Mapping[str, object]] = {
    "fewshot": {"num_prompts": 12, "num_shots": 2, "output_len": 4, "max_concurrency": 4},
    "multiturn": {
        "num_sessions": 4,
        "num_turns": 2,
        "num_shots": 1,
        "output_len": 4,
        "max_concurrency": 4,
        "history": "recorded",
    },
    "unshared": {"num_prompts": 6, "num_shots": 2, "output_len": 4, "max_concurrency": 4},
    "pressure": {"num_sessions": 6, "num_turns": 2, "num_facts": 8, "output_len": 4, "max_concurrency": 4},
}
SCALED = frozenset({"num_prompts", "num_sessions", "max_concurrency"})
"""Sizes that ``--scale`` multiplies."""
HEADER = (
    f"{'workload':<10} {'cache':<5} {'rate':>6} {'seconds':>8} {'req/s':>7} {'out tok/s':>9} {'TTFT ms':>8} "
    f"{'p99':>8} {'return':>8} {'ITL ms':>7} {'p99':>7} {'hits %':>6} {'optimum':>7}"
)


async def main() -> None:
    arguments = parse_arguments()
    benches = [load_benchmark(name, arguments.small, arguments.scale) for name in arguments.workloads.split(",")]
    print(HEADER, flush=True)
    if arguments.address is not None:
        about = {"mode": "server", "engine": arguments.engine, "cache": arguments.cache, **provenance()}
        address = arguments.address if "://" in arguments.address else f"http://{arguments.address}"
        await run_benches(benches, address, arguments, about)
        return
    from gpu import gpu_provenance  # it imports torch, which only the server needs

    about = {"mode": "server", **gpu_provenance(arguments.device, arguments.commit)}
    caches: tuple[Cache, ...] = ("on", "off") if arguments.cache in (None, "both") else (arguments.cache,)
    for cache in caches:
        begun = time.perf_counter()
        async with own_server(arguments, cache) as address:
            ready_s = round(time.perf_counter() - begun, 1)
            flags = {"cache": cache, "server_flags": " ".join(arguments.flag), "ready_s": ready_s}
            await run_benches(benches, address, arguments, flags | about)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--workloads", default="fewshot,multiturn", metavar="NAMES", help="comma-separated")
    parser.add_argument("--processes", type=int, default=4, metavar="COUNT", help="processes of the clients")
    parser.add_argument("--small", action="store_true", help="a small model and small workloads")
    parser.add_argument(
        "--scale", type=int, default=1, metavar="FACTOR", help="so many times the requests, and those in flight"
    )
    parser.add_argument(
        "--prompt-form", choices=("text", "tokens"), default="text", help="prompts as text or token ids of `tiny`"
    )
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument(
        "--request-rate",
        type=float,
        metavar="RATE",
        help="sessions that start per second, as a Poisson process, instead of a number of requests in flight",
    )
    rates.add_argument(
        "--saturation-pct",
        type=float,
        metavar="PERCENT",
        help="run each workload again with Poisson arrivals, at this percentage of its sessions per second",
    )
    parser.add_argument(
        "--cache",
        choices=("both", "on", "off"),
        help="the cache of the server; with --address the state that is known (default: both, or not known)",
    )
    parser.add_argument(
        "--flag", action="append", default=[], metavar="FLAG=VALUE", help="more flags of the own server"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="ask this server, and start none")
    parser.add_argument("--engine", metavar="NAME", help="engine and version of the server at --address")
    arguments = parser.parse_args()
    if arguments.address is not None and (arguments.flag or arguments.cache == "both"):
        parser.error("--flag and --cache both are for a server of this script, and --address names a running one")
    if arguments.address is None and arguments.engine is not None:
        parser.error("--engine names the engine of a server at --address")
    for rate in (arguments.request_rate, arguments.saturation_pct):
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            parser.error("--request-rate and --saturation-pct must be finite and above 0")
    return arguments


@asynccontextmanager
async def own_server(arguments: argparse.Namespace, cache: Cache) -> AsyncIterator[str]:
    """Runs a server of radixkv with dummy weights and yields its address."""
    from shapes import LLAMA_8B, SMALL, write_model  # they import torch, which only the server needs

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SMALL if arguments.small else LLAMA_8B, Path(folder))
        flags = [f"--model={model}", "--served-model-name=dummy", "--load-format=dummy", "--tokenizer=tiny"]
        flags += ["--dtype=bfloat16", f"--device={arguments.device}"]
        flags += [] if cache == "on" else ["--no-enable-prefix-caching"]
        async with running_server([*flags, *arguments.flag]) as address:
            yield address


async def run_benches(
    benches: Sequence[Benchmark], address: str, arguments: argparse.Namespace, about: Mapping[str, Any]
) -> None:
    """Runs every workload, and prints and writes their lines, to which ``about`` is added."""
    clients = Clients(
        address,
        arguments.processes,
        arguments.small,
        arguments.scale,
        arguments.prompt_form,
        is_own=arguments.address is None,
    )
    for bench in benches:
        line = await clients.measure(bench, arguments.request_rate)
        report(line | about, arguments.output_file)
        if arguments.saturation_pct is not None:
            rate = len(bench.sessions) / line["duration"] * arguments.saturation_pct / 100
            line = await clients.measure(bench, rate)
            report(line | {"saturation_pct": arguments.saturation_pct} | about, arguments.output_file)


def load_benchmark(name: str, is_small: bool, scale: int) -> Benchmark:
    """Returns a workload with ``scale`` times the requests, and with as many more in flight."""
    sizes = (SMALL_WORKLOADS if is_small else WORKLOADS)[name]
    scaled = {key: value * scale for key, value in sizes.items() if key in SCALED and isinstance(value, int)}
    return Benchmark(name, load_workload(name, **{**sizes, **scaled}))


@dataclass(frozen=True)
class Clients:
    """The clients of one server, in several processes."""

    address: str
    n_processes: int
    is_small: bool
    scale: int
    prompt_form: str
    """``text``, or ``tokens`` for token ids of the embedded model's tokenizer."""
    is_own: bool = False
    """Whether the server is one of this script, whose processes are watched."""

    async def measure(self, bench: Benchmark, request_rate: float | None) -> dict[str, Any]:
        """Runs the workload from a cold cache. Returns the result line.

        Args:
            bench: the workload.
            request_rate: sessions that start per second, as a Poisson process. None: a closed loop with the
                workload's number of requests in flight.
        """
        async with OpenAIClient(self.address) as client:
            model = await client.model()
            warm_up = warmup_sessions(8, seed=0, output_len=8)
            await LoadGenerator(client, self.encoder()).run(warm_up, Load(model, max_concurrency=8))
            flushed = await client.flush() is not None
        with ProcessPoolExecutor(self.n_processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(time.sleep, [0.5] * self.n_processes))  # until all processes have started
            shares = [SessionShare(self, bench.name, model, request_rate, i) for i in range(self.n_processes)]
            before = await ServerUse.now(self.address) if self.is_own else None
            timeline = Timeline(self.address) if self.is_own else None
            answers = await asyncio.to_thread(lambda: list(pool.map(run_share, shares)))
            after = await ServerUse.now(self.address) if self.is_own else None
        records = [record for share in answers for record in share]
        if failed := {record.error for record in records if record.error is not None}:
            raise SystemExit(f"{bench.name}: requests failed: {sorted(failed)[:3]}")
        records.sort(key=lambda record: (record.session, record.turn))
        began = min(record.started for record in records)
        duration = max(record.started - record.lateness + record.latency for record in records) - began
        metrics = run_metrics(Measurement(records, duration, began))
        del metrics["accuracy_pct"], metrics["n_checked"]  # dummy weights
        use: dict[str, Any] = {}
        if before is not None and after is not None and timeline is not None:
            use = after.since(before, duration, metrics["total_output_tokens"])
            use["timeline"] = await timeline.stop(began)
            use["host_memory"] = memory(self.address)
        return {
            "workload": bench.name,
            "num_prompts": len(records),
            **msgspec.structs.asdict(bench.workload),
            "max_concurrency": bench.workload.max_concurrency if request_rate is None else None,
            "request_rate": "inf" if request_rate is None else round(request_rate, 3),
            "prompt_form": self.prompt_form,
            "cache_flushed": flushed,
            "client_processes": self.n_processes,
            "client_spans_s": spans(records, self.n_processes, began),
            **metrics,
            **use,
        }

    def encoder(self) -> PromptEncoder | None:
        """Returns the encoder of prompts; None: they are sent as text."""
        return PromptEncoder(resolve_tokenizer("tiny")) if self.prompt_form == "tokens" else None


def spans(records: Sequence[Record], n_processes: int, began: float) -> list[tuple[float, float]]:
    """Returns when each process of clients sent its first request and had its last answer, in seconds."""
    shares = [[record for record in records if record.session % n_processes == i] for i in range(n_processes)]
    return [
        (
            round(min(record.started for record in share) - began, 3),
            round(max(record.started + record.latency - record.lateness for record in share) - began, 3),
        )
        for share in shares
        if share
    ]


@dataclass(frozen=True)
class SessionShare:
    """The sessions of a workload that one process sends: every ``n_processes``-th from ``first`` on."""

    clients: Clients
    name: str
    model: str
    request_rate: float | None
    """Rate of all processes together: independent Poisson processes add up to one."""
    first: int

    def load(self, max_concurrency: int) -> Load:
        """Returns how the share is sent, given the number of requests in flight of all processes together."""
        n_processes = self.clients.n_processes
        if self.request_rate is None:
            return Load(self.model, max_concurrency=max_concurrency // n_processes)
        return Load(self.model, request_rate=self.request_rate / n_processes, seed=self.first)


def run_share(share: SessionShare) -> list[Record]:
    """Runs a share of the sessions. They cannot be sent to a process, so they are generated again."""
    clients = share.clients
    bench = load_benchmark(share.name, clients.is_small, clients.scale)
    sessions = bench.sessions[share.first :: clients.n_processes]

    async def run_sessions() -> Measurement:
        async with OpenAIClient(clients.address) as client:
            generator = LoadGenerator(client, clients.encoder())
            return await generator.run(sessions, share.load(bench.workload.max_concurrency))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(run_sessions()).records
    for record in records:
        record.session = share.first + record.session * clients.n_processes
    return list(records)


def report(line: Mapping[str, Any], path: Path | None) -> None:
    print(row(line), flush=True)
    append(path, line)


def row(line: Mapping[str, Any]) -> str:
    cached, rate = line["cache_report"], line["request_rate"]
    return (
        f"{line['workload']:<10} {line['cache'] or '-':<5} {rate if rate == 'inf' else number(rate):>6} "
        f"{line['duration']:>8.2f} {line['request_throughput']:>7.1f} "
        f"{line['output_throughput']:>9.0f} {number(line['mean_ttft_ms']):>8} {number(line['p99_ttft_ms']):>8} "
        f"{number(line['mean_returning_ttft_ms']):>8} "
        f"{number(line['mean_itl_ms']):>7} {number(line['p99_itl_ms']):>7} "
        f"{number(cached['cache_hit_rate_pct']):>6} {number(cached['optimum_pct']):>7}"
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    asyncio.run(main())
