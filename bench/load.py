"""Measurement error of the load generator: requests at a rate to a server that computes nothing (null_openai.py).

Appends one JSON line a run, with percentiles in milliseconds:

    arrival_error   time from the server's time stamp of a chunk to the client's
    lateness        time from when a request was due to the client's time stamp of sending it
    seen_late       time from when a request was due until the server has received it

Limits: below 1 ms at the median and below 5 ms at the 99th percentile for 500 requests a second of 16 chunks, with
the server on one core and the client on another.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.load.record import Measurement
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.lab.bench.session import BenchRequest, single_request_session
from radixkv.processes.child_process import ChildProcess

HERE = Path(__file__).parent
N_CHUNKS = 16
LONG_EVERY = 100
MEDIAN_LIMIT_MS = 1.0
P99_LIMIT_MS = 5.0


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-ms", type=float, default=10.0, help="time between a request's chunks")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--prompt-ids", type=int, default=0, metavar="COUNT", help="prompt token ids in each 100th reply; 0: none"
    )
    arguments = parser.parse_args()
    is_within_limits = True
    for _ in range(arguments.runs):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            line = runner.run(measure(arguments.rate, arguments.seconds, arguments.prompt_ids, arguments.every_ms))
        line["every_ms"] = arguments.every_ms
        is_within_limits = is_within_limits and line["is_kept"]
        report(arguments.output_file, line, provenance())
    return 0 if is_within_limits else 1


async def measure(rate: float, seconds: float, n_prompt_ids: int, every_ms: float) -> dict[str, Any]:
    """Returns one run's line."""
    async with null_server(every_ms) as address, OpenAIClient(address) as client:
        generator = LoadGenerator(client)
        await generator.run([single_request_session(BenchRequest("warm", N_CHUNKS))] * 64, Load("null"))
        sessions = [single_request_session(BenchRequest("The rain in Spain", N_CHUNKS))] * round(rate * seconds)
        if n_prompt_ids:
            long = single_request_session(BenchRequest(str(n_prompt_ids), N_CHUNKS))
            sessions[LONG_EVERY // 2 :: LONG_EVERY] = [long] * len(sessions[LONG_EVERY // 2 :: LONG_EVERY])
        busy_s = time.process_time()
        measurement = await generator.run(sessions, Load("null", request_rate=rate))
        busy_s = time.process_time() - busy_s
    errors = [record.error for record in measurement.records if record.error is not None]
    delays = {
        "arrival_error": spread(arrival_errors(measurement)),
        "lateness": spread([record.lateness for record in measurement.records]),
        "seen_late": spread(seen_late(measurement)),
    }
    return {
        "rate": rate,
        "requests": len(measurement.records),
        "chunks": N_CHUNKS,
        "prompt_ids_of_each_100th": n_prompt_ids,
        "duration_s": round(measurement.duration, 2),
        "errors": errors[:3],
        **delays,
        "client_busy_pct": round(100 * busy_s / measurement.duration, 1),
        "is_kept": not errors
        and all(each["p50_ms"] < MEDIAN_LIMIT_MS and each["p99_ms"] < P99_LIMIT_MS for each in delays.values()),
    }


def arrival_errors(measurement: Measurement) -> list[float]:
    """Returns the seconds for each chunk."""
    errors = []
    for record in measurement.records:
        for choice in record.choices:
            for stamps, arrival in zip(choice.text.split(), choice.arrivals, strict=True):
                errors.append(record.started + arrival - int(stamps.partition(":")[2]) / 1e9)
    return errors


def seen_late(measurement: Measurement) -> list[float]:
    """Returns the seconds for each request."""
    return [
        int(choice.text.partition(":")[0]) / 1e9 - record.scheduled
        for record in measurement.records
        if record.scheduled is not None
        for choice in record.choices
    ]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    values = sorted(1e3 * value for value in seconds)
    names = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p99_9_ms": 99.9, "max_ms": 100}
    return {name: round(percentile(values, percent) or 0.0, 3) for name, percent in names.items()}


@asynccontextmanager
async def null_server(every_ms: float) -> AsyncIterator[str]:
    """Runs the null server and yields its address."""
    process = await ChildProcess.start([sys.executable, str(HERE / "null_openai.py"), str(every_ms / 1e3)])
    try:
        yield f"http://127.0.0.1:{int(await process.read_line())}"
    finally:
        await process.close()


if __name__ == "__main__":
    sys.exit(main())
