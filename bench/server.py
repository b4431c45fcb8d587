"""Cost of a running server: time to ready, memory over thousands of requests, and cache work on the host.

Appends one JSON line per case. The server is `radixkv serve` with the embedded model.

    ready            seconds from the start to an answer of /health, with warm file caches: median of several starts
    memory           resident bytes of both processes after 500 and after 3,000 requests without shared prefixes;
                     the pool is smaller than their pages, so that every request evicts pages
    host_work        the scheduler's share of step time in the same run, by the engine's own counters
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import msgspec
from result_lines import report, script_parser

from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.processes.server_process import running_server

FLAGS = ("--max-total-tokens", "65536")


async def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs=2, default=(500, 3000), metavar=("FIRST", "LAST"))
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--output-tokens", type=int, default=8)
    arguments = parser.parse_args()
    lines = [await measure_ready(arguments.starts)]
    lines += await measure_memory(arguments.requests, arguments.prompt_tokens, arguments.output_tokens)
    for line in lines:
        report(arguments.output_file, line, provenance())


async def measure_ready(n_starts: int) -> dict[str, object]:
    times_s = []
    for _ in range(n_starts + 1):
        started_at = time.perf_counter()
        async with running_server(()):
            times_s.append(round(time.perf_counter() - started_at, 3))
    times_s = times_s[1:]  # the first may have built the embedded model
    return {"case": "ready", "median_s": median(times_s), "max_s": max(times_s), "starts_s": times_s}


async def measure_memory(counts: Sequence[int], n_prompt: int, n_output: int) -> list[dict[str, object]]:
    rng = Random(1)
    first, last = counts
    async with running_server(FLAGS) as address, HTTPClient(address) as client:
        frontend, runtime = processes(address)
        sizes = []
        for n_requests in (first, last - first):
            prompts = [[rng.randrange(10, 3000) for _ in range(n_prompt)] for _ in range(n_requests)]
            await _complete(client, prompts, n_output)
            sizes.append((resident_bytes(frontend), resident_bytes(runtime)))
        totals = counters(await client.request("GET", "/metrics"))
    growth = [100 * (after / before - 1) for before, after in zip(*sizes, strict=True)]
    return [
        {
            "case": "memory",
            "requests": list(counts),
            "frontend_bytes": [size[0] for size in sizes],
            "runtime_bytes": [size[1] for size in sizes],
            "frontend_growth_pct": round(growth[0], 2),
            "runtime_growth_pct": round(growth[1], 2),
            "pages_evicted": totals["pages_evicted_total"],
        },
        {
            "case": "host_work",
            "requests": last,
            "step_seconds": round(totals["step_seconds_total"], 3),
            "schedule_seconds": round(totals["schedule_seconds_total"], 3),
            "schedule_pct_of_step": round(100 * totals["schedule_seconds_total"] / totals["step_seconds_total"], 3),
            "steps": totals["steps_total"],
        },
    ]


async def _complete(client: HTTPClient, prompts: Sequence[Sequence[int]], n_output: int) -> None:
    waiting = iter(prompts)

    async def worker() -> None:
        for prompt in waiting:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": n_output, "temperature": 0, "ignore_eos": True}
            await client.request("POST", "/v1/completions", msgspec.json.encode(body))

    await asyncio.gather(*(worker() for _ in range(8)))


def processes(address: str) -> tuple[int, int]:
    """Returns the ids of the process that listens at the address and of its child."""
    frontend = frontend_process(address)
    return frontend, descendants(frontend, deep=False)[0]


def frontend_process(address: str) -> int:
    """Returns the id of the process that listens at an address of this machine."""
    port = int(address.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    inode = next(
        fields[9] for fields in map(str.split, lines) if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"
    )
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return next(pid for pid in pids if _has_socket(pid, inode))


def descendants(pid: int, *, deep: bool = True) -> list[int]:
    """Returns the ids of a process's children, and with ``deep`` of theirs behind each."""
    found: list[int] = []
    for task in sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
        for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()):
            found += [child, *descendants(child)] if deep else [child]
    return found


def _has_socket(pid: int, inode: str) -> bool:
    try:
        return any(link.readlink().name == f"socket:[{inode}]" for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def processor_s(folder: str) -> float:
    """Returns the seconds of processor time of a process or thread so far, by its folder in /proc."""
    fields = Path(folder, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counters(metrics: bytes) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in metrics.decode().splitlines() if line and not line.startswith("#"))
    return {name.removeprefix("radixkv:"): float(value) for name, value in pairs}


if __name__ == "__main__":
    asyncio.run(main())
