"""What the frontend costs: the server over a runtime that computes nothing (null_runtime.py).

Appends one JSON line a case:

    paced       64 clients stream requests of 16 chunks each, a step every 80 ms: requests a second, and the time
                from the runtime's send of a token to the client's read of its chunk
    saturated   the same with a step every 10 ms: the most requests a second; chunks may hold several steps
    tokenizing  as paced, while two more clients send prompts of 100,000 characters over and over

Each has the longest callbacks of the event loop, in milliseconds of its thread's processor time and of wall time;
wall time has what other processes and threads took of the core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median, quantiles

from null_runtime import TOKENS_A_STAMP, age_s

from radixkv.bench.environment import environment

HERE = Path(__file__).parent
N_CLIENTS = 64
N_CHUNKS = 16
N_LONG_CLIENTS = 2
CASES = {"paced": 0.08, "saturated": 0.01, "tokenizing": 0.08}
"""Case: seconds a step."""
LONG_PROMPT = "The rain in Spain stays mainly in the plain; 12 + 30 = 42. " * 1700
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:"


@dataclass
class Server:
    """A watched frontend over a null runtime."""

    process: subprocess.Popen[str]
    port: int
    report: Path

    def longest_callbacks(self) -> list[list[object]]:
        """Since the last time: milliseconds of processor and of wall time, and what it was."""
        self.report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.report.exists():
            time.sleep(0.01)
        longest = json.loads(self.report.read_text())
        return [[round(cpu_s * 1e3, 2), round(wall_s * 1e3, 2), name] for cpu_s, wall_s, name in longest]


@dataclass
class Figures:
    """What the clients saw."""

    ages_s: list[float] = field(default_factory=list)
    n_requests: int = 0
    n_chunks: int = 0
    n_long: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="a case")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    with arguments.output_file.open("a", encoding="utf-8") as output:
        for case in arguments.cases:
            line = asyncio.run(measured(case, arguments.seconds))
            print(json.dumps(line))
            output.write(json.dumps(line | {"date": date.today().isoformat(), "environment": environment()}) + "\n")


async def measured(case: str, seconds: float) -> dict[str, object]:
    """One case's line."""
    with started(CASES[case]) as server:
        await clients(server.port, 2.0, n_long=0)  # the first requests import and allocate
        server.longest_callbacks()
        begun = time.perf_counter()
        figures = await clients(server.port, seconds, n_long=N_LONG_CLIENTS if case == "tokenizing" else 0)
        duration = time.perf_counter() - begun
        longest = server.longest_callbacks()
    percentiles = quantiles(figures.ages_s, n=100)
    return {
        "case": case,
        "clients": N_CLIENTS,
        "step_ms": CASES[case] * 1e3,
        "duration_s": round(duration, 2),
        "requests": figures.n_requests,
        "requests_per_s": round(figures.n_requests / duration, 1),
        "chunks_per_request": round(figures.n_chunks / figures.n_requests, 2),
        "long_prompts": figures.n_long,
        "added_latency_p50_ms": round(median(figures.ages_s) * 1e3, 2),
        "added_latency_p99_ms": round(percentiles[98] * 1e3, 2),
        "added_latency_max_ms": round(max(figures.ages_s) * 1e3, 2),
        "longest_callbacks_ms": longest,
    }


async def clients(port: int, seconds: float, *, n_long: int) -> Figures:
    """Streams requests until the time is over; each client ends the request that it has begun."""
    figures = Figures()
    deadline = time.monotonic() + seconds
    short = request(PROMPT, N_CHUNKS * TOKENS_A_STAMP, stream=True, return_token_ids=True)
    long = request(LONG_PROMPT, TOKENS_A_STAMP)

    async def client() -> None:
        while time.monotonic() < deadline:
            await stream(port, short, figures)
            figures.n_requests += 1

    async def long_client() -> None:
        while time.monotonic() < deadline:
            async with connected(port) as (reader, writer):
                writer.write(long)
                if not (await reader.read()).startswith(b"HTTP/1.1 200 "):
                    raise SystemExit("a long prompt was refused")
            figures.n_long += 1

    await asyncio.gather(*(client() for _ in range(N_CLIENTS)), *(long_client() for _ in range(n_long)))
    return figures


def request(prompt: str, max_tokens: int, **options: bool) -> bytes:
    """An HTTP request, whole."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **options})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def stream(port: int, content: bytes, figures: Figures) -> None:
    """One request; the age of each stamp when it is read."""
    async with connected(port) as (reader, writer):
        writer.write(content)
        while line := await reader.readline():
            now_ns = time.monotonic_ns()
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                ids = json.loads(line[6:])["choices"][0]["token_ids"]
                figures.n_chunks += 1
                for start in range(0, len(ids), TOKENS_A_STAMP):
                    figures.ages_s.append(age_s(ids[start : start + TOKENS_A_STAMP], now_ns))
    raise SystemExit("a stream ended without its end; is the server there?")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@contextmanager
def started(step_s: float) -> Iterator[Server]:
    """A server on a free port."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = ["--port", "0", "--stats-interval", "0"]
        process = subprocess.Popen(
            [sys.executable, str(HERE / "watched_frontend.py"), str(report), str(step_s), *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+) ", process.stdout.readline())
            if match is None:
                raise SystemExit("the server did not start; its reason is above")
            yield Server(process, int(match[1]), report)
        finally:
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    main()
