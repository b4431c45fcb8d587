"""What the frontend costs: the server over a runtime that computes nothing (null_runtime.py).

Appends one JSON line a case:

    paced       64 clients stream requests of 16 tokens each, a step every 80 ms: requests a second, and the time
                from the runtime's send of a token to the client's read of its chunk
    tokenizing  as paced, while two more clients send prompts of 100,000 characters over and over
    ids         as paced, while two more send 64 prompts of 20,000 token ids each, 7.7 MB
    scoring     as paced, while two more ask for the 20 likeliest tokens at each of 2,000 places of a prompt, 2.7 MB
    crowd       256 clients stream requests of 32 tokens each, a step every 15 ms, as a GPU gives them
    saturated   the same with a step every 5 ms: more than the frontend can send, so that chunks hold several tokens
    fewshot     256 clients stream 32 tokens to texts of about 980 tokens (3,200 characters), a step every 11 ms
    long        the same with texts of about 1,560 tokens (5,100 characters)

Each has the processor time of the frontend's process, for a request, and for a chunk and a token, requests
included; that of its event loop's thread; and the longest that the loop was late. Clients and null runtime run
on the same machine, so that of all figures processor time depends least on what else that does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import uvloop
from null_runtime import age_s

from radixkv.bench.environment import origin
from radixkv.bench.run import Bench
from radixkv.bench.workloads.catalog import WorkloadChanges, load_workload

HERE = Path(__file__).parent
N_HEAVY_CLIENTS = 2
N_QUESTIONS = 8192
"""Behind one prefix: more than are asked in a run, as the server keeps the ids of what texts share."""
HEAVY = {
    "tokenizing": {"prompt": "The rain in Spain stays mainly in the plain; 12 + 30 = 42. " * 1700},
    "ids": {"prompt": [list(range(1000, 3000)) * 10] * 64},
    "scoring": {"prompt": list(range(1000, 3000)), "prompt_logprobs": 20},
}
"""What clients ask over and over in some cases, beside those that are measured."""
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """What is asked, and how fast it is answered."""

    n_clients: int
    n_tokens: int
    """Of each answer."""
    step_s: float
    n_shots: int = 0
    """Worked examples before each question, as in the workload ``fewshot``; 0: one question, over and over."""


CASES = {
    "paced": Case(64, 16, 0.08),
    **dict.fromkeys(HEAVY, Case(64, 16, 0.08)),
    "crowd": Case(256, 32, 0.015),
    "saturated": Case(256, 32, 0.005),
    "fewshot": Case(256, 32, 0.011, n_shots=9),
    "long": Case(256, 32, 0.011, n_shots=15),
}


@dataclass
class Server:
    """A watched frontend over a null runtime."""

    process: subprocess.Popen[str]
    port: int
    report: Path

    def longest_delay_ms(self) -> float:
        """How late its event loop was at most, since the last time."""
        self.report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.report.exists():
            time.sleep(0.01)
        return round(float(self.report.read_text()) * 1e3, 2)

    def processor_s(self) -> float:
        """What it has used, in all its threads, without the runtime's process."""
        return _used_s(Path(f"/proc/{self.process.pid}/stat"))

    def loop_s(self) -> float:
        """What of it the event loop's thread has used."""
        return _used_s(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat"))


def _used_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


@dataclass
class Figures:
    """What the clients saw."""

    ages_s: list[float] = field(default_factory=list)
    n_requests: int = 0
    n_chunks: int = 0
    n_heavy: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="a case")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--note", help="goes into each line")
    arguments = parser.parse_args()
    note = {} if arguments.note is None else {"note": arguments.note}
    with arguments.output_file.open("a", encoding="utf-8") as output:
        for case in arguments.cases:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                line = runner.run(measured(case, arguments.seconds)) | note
            print(json.dumps(line), flush=True)
            output.write(json.dumps(line | origin()) + "\n")


async def measured(name: str, seconds: float) -> dict[str, object]:
    """One case's line."""
    case = CASES[name]
    with started(case.step_s) as server:
        await clients(server.port, 2.0, name)  # the first requests import and allocate
        server.longest_delay_ms()
        begun, processor_s, loop_s = time.perf_counter(), server.processor_s(), server.loop_s()
        figures = await clients(server.port, seconds, name)
        duration = time.perf_counter() - begun
        processor_s = server.processor_s() - processor_s
        loop_s = server.loop_s() - loop_s
        longest_delay_ms = server.longest_delay_ms()
    percentiles = quantiles(figures.ages_s, n=100)
    return {
        "case": name,
        "clients": case.n_clients,
        "step_ms": case.step_s * 1e3,
        "duration_s": round(duration, 2),
        "requests": figures.n_requests,
        "requests_per_s": round(figures.n_requests / duration, 1),
        "tokens_per_s": round(len(figures.ages_s) / duration),
        "chunks_per_s": round(figures.n_chunks / duration),
        "heavy_requests": figures.n_heavy,
        "processor_pct": round(100 * processor_s / duration, 1),
        "processor_us_per_request": round(1e6 * processor_s / figures.n_requests),
        "loop_us_per_request": round(1e6 * loop_s / figures.n_requests),
        "processor_us_per_chunk": round(1e6 * processor_s / figures.n_chunks, 1),
        "processor_us_per_token": round(1e6 * processor_s / len(figures.ages_s), 1),
        "added_latency_p50_ms": round(median(figures.ages_s) * 1e3, 2),
        "added_latency_p99_ms": round(percentiles[98] * 1e3, 2),
        "added_latency_max_ms": round(max(figures.ages_s) * 1e3, 2),
        "longest_delay_ms": longest_delay_ms,
    }


async def clients(port: int, seconds: float, name: str) -> Figures:
    """Streams requests of a case until the time is over; each client ends the request that it has begun."""
    case, figures = CASES[name], Figures()
    deadline = time.monotonic() + seconds
    requests = itertools.cycle([streamed(prompt, case.n_tokens) for prompt in prompts(case.n_shots)])

    async def client() -> None:
        reader = await connected(port, Reader(figures))
        while time.monotonic() < deadline:
            await reader.ask(next(requests))
            figures.n_requests += 1
        reader.transport.close()

    async def heavy_client(asked: bytes) -> None:
        reader = await connected(port, TailReader(Figures()))
        while time.monotonic() < deadline:
            await reader.ask(asked)
            figures.n_heavy += 1
        reader.transport.close()

    heavy = [request(max_tokens=1, **HEAVY[name])] * N_HEAVY_CLIENTS if name in HEAVY else []
    await asyncio.gather(*(client() for _ in range(case.n_clients)), *map(heavy_client, heavy))
    return figures


def prompts(n_shots: int) -> list[str]:
    """What clients ask, in turn."""
    if not n_shots:
        return [PROMPT]
    workload = load_workload("fewshot", WorkloadChanges(num_prompts=N_QUESTIONS, num_shots=n_shots))
    asked = [next(session.turns())[0].prompt for session in Bench.make("fewshot", workload).sessions]
    return [prompt for prompt in asked if isinstance(prompt, str)]


def streamed(prompt: str, max_tokens: int) -> bytes:
    """A request as `radixkv bench` sends it."""
    return request(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
        return_token_ids=True,
    )


def request(**fields: object) -> bytes:
    """An HTTP request, whole."""
    body = json.dumps(fields)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class Reader(asyncio.Protocol):
    """A connection that costs little: chunks are looked at as bytes, and each stamp's age is noted."""

    transport: asyncio.Transport
    _ids = re.compile(rb'"token_ids":\[([\d,]*)\]')

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._rest = b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    async def ask(self, content: bytes) -> None:
        """One request, to the end of its answer."""
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        await self._ended

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for match in self._ids.finditer(whole):
            self._figures.n_chunks += 1
            self._figures.ages_s.extend(age_s(int(token), now_ns) for token in match[1].split(b",") if token)
        if b"data: [DONE]" in whole or self._rest.endswith(b"}}}"):
            self._rest = b""
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(SystemExit("a stream ended without its end; is the server there?"))


class TailReader(Reader):
    """Looks at nothing but the end of a reply, which may be long."""

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}}}"):
            self._ended.set_result(None)


async def connected(port: int, reader: Reader) -> Reader:
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    return reader


@contextmanager
def started(step_s: float) -> Iterator[Server]:
    """A server on a free port."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
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
