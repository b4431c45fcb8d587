"""What the load generator itself costs: requests at a rate to a server that computes nothing (null_openai.py).

Appends one JSON line a run, with percentiles in milliseconds:

    arrival_error   when the client says that a chunk came, after the server's own stamp of sending it
    lateness        when the client says that it sent a request, after that was due
    seen_late       when the server has the whole request, after that was due

500 requests a second of 16 chunks are to stay below 1 ms at the median and below 5 ms at the 99th percentile, with
the server on one core and the client on another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from radixkv.bench.environment import origin
from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.client import Client
from radixkv.bench.load.generator import LoadGenerator
from radixkv.bench.load.record import Measurement
from radixkv.bench.report.run_metrics import percentile
from radixkv.bench.session import Request, lone

HERE = Path(__file__).parent
N_CHUNKS = 16
LONG_EVERY = 100
MEDIAN_LIMIT_MS = 1.0
P99_LIMIT_MS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-ms", type=float, default=10.0, help="between a request's chunks")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--prompt-ids", type=int, default=0, metavar="COUNT", help="that each 100th reply has; 0: none has any"
    )
    arguments = parser.parse_args()
    is_kept = True
    for _ in range(arguments.runs):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, started(arguments.every_ms) as address:
            line = runner.run(measured(address, arguments.rate, arguments.seconds, arguments.prompt_ids))
        line["every_ms"] = arguments.every_ms
        is_kept = is_kept and line["is_kept"]
        print(json.dumps(line), flush=True)
        if arguments.output_file is not None:
            with arguments.output_file.open("a", encoding="utf-8") as output:
                output.write(json.dumps(line | origin()) + "\n")
    return 0 if is_kept else 1


async def measured(address: str, rate: float, seconds: float, n_prompt_ids: int) -> dict[str, Any]:
    """One run's line."""
    async with Client(address) as client:
        generator = LoadGenerator(client)
        await generator.run([lone(Request("warm", N_CHUNKS))] * 64, Load("null"))
        sessions = [lone(Request("The rain in Spain", N_CHUNKS))] * round(rate * seconds)
        if n_prompt_ids:
            long = lone(Request(str(n_prompt_ids), N_CHUNKS))
            sessions[LONG_EVERY // 2 :: LONG_EVERY] = [long] * len(sessions[LONG_EVERY // 2 :: LONG_EVERY])
        busy_s = time.process_time()
        measurement = await generator.run(sessions, Load("null", request_rate=rate))
        busy_s = time.process_time() - busy_s
    errors = [record.error for record in measurement.records if record.error is not None]
    figures = {
        "arrival_error": spread(arrival_errors(measurement)),
        "lateness": spread([record.waited for record in measurement.records]),
        "seen_late": spread(seen_late(measurement)),
    }
    return {
        "rate": rate,
        "requests": len(measurement.records),
        "chunks": N_CHUNKS,
        "prompt_ids_of_each_100th": n_prompt_ids,
        "duration_s": round(measurement.duration, 2),
        "errors": errors[:3],
        **figures,
        "client_busy_pct": round(100 * busy_s / measurement.duration, 1),
        "is_kept": not errors
        and all(each["p50_ms"] < MEDIAN_LIMIT_MS and each["p99_ms"] < P99_LIMIT_MS for each in figures.values()),
    }


def arrival_errors(measurement: Measurement) -> list[float]:
    """Seconds, a chunk each."""
    found = []
    for record in measurement.records:
        for answer in record.answers:
            for stamps, arrival in zip(answer.text.split(), answer.arrivals, strict=True):
                found.append(record.started + arrival - int(stamps.partition(":")[2]) / 1e9)
    return found


def seen_late(measurement: Measurement) -> list[float]:
    """Seconds, a request each."""
    return [
        int(answer.text.partition(":")[0]) / 1e9 - record.scheduled
        for record in measurement.records
        if record.scheduled is not None
        for answer in record.answers
    ]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    values = sorted(1e3 * value for value in seconds)
    names = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p99_9_ms": 99.9, "max_ms": 100}
    return {name: round(percentile(values, percent) or 0.0, 3) for name, percent in names.items()}


@contextmanager
def started(every_ms: float) -> Iterator[str]:
    """The null server's address."""
    command = [sys.executable, str(HERE / "null_openai.py"), str(every_ms / 1e3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
