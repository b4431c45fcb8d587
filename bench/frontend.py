"""Cost of the frontend, measured with a runtime that computes nothing (null_runtime.py).

Appends one JSON line per case:

    paced       64 clients stream requests of 16 tokens each, a step every 80 ms: requests per second, and the time
                from the runtime's send of a token to the client's read of its chunk
    tokenizing  paced, while two more clients repeatedly send prompts of 100,000 characters
    ids         paced, while two more clients repeatedly send 64 prompts of 20,000 token ids each, 7.7 MB
    scoring     paced, while two more clients request the 20 likeliest tokens at each of 2,000 prompt tokens, 2.7 MB
    crowd       256 clients stream requests of 32 tokens each, a step every 15 ms, as on a GPU
    many        512 clients stream requests of 32 tokens each, a step every 20 ms, as on a GPU with 512 rows
    saturated   crowd with a step every 5 ms: more than the frontend can send, so that chunks have several tokens
    fewshot     256 clients stream 32 tokens each for prompts of about 980 tokens (3,200 characters), a step every
                11 ms
    long        fewshot with prompts of about 1,560 tokens (5,100 characters)
    texts       256 clients stream completions of 64 tokens each, a step every 50 ms, so that every token has
                a chunk of its own even on a busy machine
    chats       texts as chat completions
    replicas    chats, with two runtimes
    short       64 clients stream one token each, a step every 5 ms: what a request costs
    gpu         fewshot with the steps of a modelled GPU (modelled_steps.py)
    gpus        512 clients, with two runtimes that are such
    start       wave with 512 clients, new connections for each wave, and two runtimes that are modelled GPUs
    wave        fewshot, but all clients send at the same time, and wait until all answers are complete; a step each
                60 ms, so that every token has a chunk of its own. The line has the time from the wave's start until
                the runtimes have half of the requests, and all; until half of the clients have their first tokens,
                and all; and the processor time of the event loop meanwhile

Each line has how many prompts each of several runtimes got; the number of tokens that answers lack; the processor
time of the frontend process per request, per chunk and per token; that of its event loop's thread; and the loop's
longest delay. The time per chunk and per token includes that of the requests. Clients and null runtime run on the
same machine: processor time is the value that other load disturbs least.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar, cast

import uvloop
from null_runtime import age_s
from result_lines import report, script_parser
from server import processor_s
from server_use import placements

from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.run import Benchmark
from radixkv.lab.bench.workloads.catalog import load_workload
from radixkv.processes.child_process import ChildProcess

HERE = Path(__file__).parent
N_HEAVY_CLIENTS = 2
STOP_LIMIT_S = 30.0
N_QUESTIONS = 8192
"""Questions after one prefix; more than a run sends, because the server caches the ids of shared texts."""
HEAVY = {
    "tokenizing": {"prompt": "The rain in Spain stays mainly in the plain; 12 + 30 = 42. " * 1700},
    "ids": {"prompt": [list(range(1000, 3000)) * 10] * 64},
    "scoring": {"prompt": list(range(1000, 3000)), "prompt_logprobs": 20},
}
"""Requests that further, unmeasured clients repeat in some cases."""
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:"


@dataclass(frozen=True)
class Case:
    """The clients' requests and the runtime's speed."""

    n_clients: int
    n_tokens: int
    """Tokens per answer."""
    step_s: float | None
    """None: as a modelled GPU."""
    n_shots: int = 0
    """Worked examples before each question, as in the workload ``fewshot``; 0 repeats one question."""
    in_waves: bool = False
    """Whether all clients wait for each other before each request."""
    is_chat: bool = False
    """Whether the prompts are chats of one message."""
    n_replicas: int = 1
    """Runtimes behind the frontend."""


CASES = {
    "paced": Case(64, 16, 0.08),
    **dict.fromkeys(HEAVY, Case(64, 16, 0.08)),
    "crowd": Case(256, 32, 0.015),
    "many": Case(512, 32, 0.02),
    "saturated": Case(256, 32, 0.005),
    "fewshot": Case(256, 32, 0.011, n_shots=9),
    "long": Case(256, 32, 0.011, n_shots=15),
    "texts": Case(256, 64, 0.05),
    "chats": Case(256, 64, 0.05, is_chat=True),
    "replicas": Case(256, 64, 0.05, is_chat=True, n_replicas=2),
    "short": Case(64, 1, 0.005),
    "gpu": Case(256, 32, None, n_shots=9),
    "gpus": Case(512, 32, None, n_shots=9, n_replicas=2),
    "start": Case(512, 32, None, n_shots=9, in_waves=True, n_replicas=2),
    "wave": Case(256, 32, 0.06, n_shots=9, in_waves=True),
}


@dataclass
class WatchedServer:
    """A frontend with a watch on its event loop, in front of a null runtime."""

    process: ChildProcess
    port: int
    report: Path

    def longest_delay_ms(self) -> float:
        """Returns the event loop's longest delay since the last call."""
        self.report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.report.exists():
            time.sleep(0.01)
        return round(float(self.report.read_text()) * 1e3, 2)

    def processor_s(self) -> float:
        """Returns the processor time of all threads, without the runtime's process."""
        return processor_s(f"/proc/{self.process.pid}")

    async def placed(self) -> list[int]:
        """Returns how many prompts each runtime got; nothing if there is one."""
        async with HTTPClient(f"http://127.0.0.1:{self.port}") as client:
            metrics = (await client.request("GET", "/metrics")).decode()
        placed: Counter[str] = Counter()
        for (replica, _), count in placements(metrics).items():
            placed[replica] += count
        return [placed[replica] for replica in sorted(placed)]

    def loop_s(self) -> float:
        """Returns the processor time of the event loop's thread."""
        return processor_s(f"/proc/{self.process.pid}/task/{self.process.pid}")


@dataclass
class ClientStats:
    """What the clients observed."""

    ages_s: list[float] = field(default_factory=list)
    """Per token, the time from the runtime's send to the client's read."""
    n_requests: int = 0
    n_chunks: int = 0
    n_heavy: int = 0
    """Requests of the unmeasured clients."""
    submitted_s: list[list[float]] = field(default_factory=list)
    """Per wave and request, the time from the wave's start to the request's arrival at the runtime."""
    first_tokens_s: list[list[float]] = field(default_factory=list)
    """Per wave and request, the time from the wave's start to the client's read of the first token."""
    wave_loop_s: list[float] = field(default_factory=list)
    """Per wave, the processor time of the event loop until then."""

    def waves_ms(self) -> dict[str, float]:
        """Returns medians over the waves; nothing if there are none."""
        if not self.submitted_s:
            return {}
        times = {"submitted": self.submitted_s, "first_token": self.first_tokens_s}
        spans = {
            f"{which}_{name}_ms": round(1e3 * median(map(of, waves)), 1)
            for name, waves in times.items()
            for which, of in (("half", median), ("last", max))
        }
        return spans | {"loop_until_first_tokens_ms": round(1e3 * median(self.wave_loop_s), 1)}


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="per case")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--note", help="text to add to each line")
    arguments = parser.parse_args()
    note = {} if arguments.note is None else {"note": arguments.note}
    for case in arguments.cases:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            line = runner.run(measure(case, arguments.seconds)) | note
        report(arguments.output_file, line, provenance())


async def measure(name: str, seconds: float) -> dict[str, object]:
    """Measures one case and returns its line."""
    case = CASES[name]
    runtime_arguments = "gpu" if case.step_s is None else str(case.step_s)
    if case.in_waves:
        runtime_arguments += " submitted"
    async with running_server(runtime_arguments, case.n_replicas) as server:
        await clients(server, 2.0, name)  # the first requests import and allocate
        server.longest_delay_ms()
        started_at, processor_s, loop_s = time.perf_counter(), server.processor_s(), server.loop_s()
        placed_before = await server.placed()
        stats = await clients(server, seconds, name)
        duration = time.perf_counter() - started_at
        processor_s = server.processor_s() - processor_s
        loop_s = server.loop_s() - loop_s
        longest_delay_ms = server.longest_delay_ms()
        placed = [now - then for then, now in zip(placed_before, await server.placed(), strict=True)]
    percentiles = quantiles(stats.ages_s, n=100)
    return {
        "case": name,
        "clients": case.n_clients,
        "step_ms": None if case.step_s is None else case.step_s * 1e3,
        "duration_s": round(duration, 2),
        "requests": stats.n_requests,
        "requests_per_s": round(stats.n_requests / duration, 1),
        "tokens_per_s": round(len(stats.ages_s) / duration),
        "chunks_per_s": round(stats.n_chunks / duration),
        "lost_tokens": stats.n_requests * case.n_tokens - len(stats.ages_s),
        "heavy_requests": stats.n_heavy,
        "processor_pct": round(100 * processor_s / duration, 1),
        "processor_us_per_request": round(1e6 * processor_s / stats.n_requests),
        "loop_us_per_request": round(1e6 * loop_s / stats.n_requests),
        "processor_us_per_chunk": round(1e6 * processor_s / stats.n_chunks, 1),
        "processor_us_per_token": round(1e6 * processor_s / len(stats.ages_s), 1),
        "added_latency_p50_ms": round(median(stats.ages_s) * 1e3, 2),
        "added_latency_p99_ms": round(percentiles[98] * 1e3, 2),
        "added_latency_max_ms": round(max(stats.ages_s) * 1e3, 2),
        "longest_delay_ms": longest_delay_ms,
        **stats.waves_ms(),
        "placed": placed,
    }


async def clients(server: WatchedServer, seconds: float, name: str) -> ClientStats:
    """Sends a case's requests for ``seconds``; each client then finishes its current request."""
    case, stats, port = CASES[name], ClientStats(), server.port
    deadline = time.monotonic() + seconds
    requests = itertools.cycle([stream_request(prompt, case) for prompt in prompts(case.n_shots)])
    if case.in_waves:
        return await waves(server, seconds, case, requests)

    async def client() -> None:
        reader = await connect(port, Reader(stats))
        while time.monotonic() < deadline:
            await reader.send(next(requests))
            stats.n_requests += 1
        reader.transport.close()

    async def heavy_client(content: bytes) -> None:
        reader = await connect(port, TailReader(ClientStats()))
        while time.monotonic() < deadline:
            await reader.send(content)
            stats.n_heavy += 1
        reader.transport.close()

    heavy = [request("/v1/completions", max_tokens=1, **HEAVY[name])] * N_HEAVY_CLIENTS if name in HEAVY else []
    await asyncio.gather(*(client() for _ in range(case.n_clients)), *map(heavy_client, heavy))
    return stats


async def waves(server: WatchedServer, seconds: float, case: Case, requests: Iterator[bytes]) -> ClientStats:
    """Sends waves of requests for ``seconds``, each after the last answer of the one before."""
    stats = ClientStats()
    readers: list[FirstStampReader] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not readers or case.step_s is None:
            for reader in readers:
                reader.transport.close()
            readers = [await connect(server.port, FirstStampReader(stats)) for _ in range(case.n_clients)]
        stats.submitted_s.append([])
        stats.first_tokens_s.append([])
        stats.wave_loop_s.append(0.0)
        wave = list(itertools.islice(requests, case.n_clients))
        begun_ns, loop_s = time.monotonic_ns(), server.loop_s()
        answers = asyncio.gather(
            *(reader.send_in_wave(begun_ns, each) for reader, each in zip(readers, wave, strict=True))
        )
        while len(stats.first_tokens_s[-1]) < case.n_clients:
            await asyncio.sleep(0.01)
        stats.wave_loop_s[-1] = server.loop_s() - loop_s
        await answers
        stats.n_requests += case.n_clients
    for reader in readers:
        reader.transport.close()
    return stats


def prompts(n_shots: int) -> list[str]:
    """Returns the clients' prompts, in the order of use."""
    if not n_shots:
        return [PROMPT]
    workload = load_workload("fewshot", num_prompts=N_QUESTIONS, num_shots=n_shots)
    first_prompts = [next(session.turns())[0].prompt for session in Benchmark("fewshot", workload).sessions]
    return [prompt for prompt in first_prompts if isinstance(prompt, str)]


def stream_request(prompt: str, case: Case) -> bytes:
    """Encodes a streaming request as `radixkv bench` sends it."""
    path, content = "/v1/completions", {"prompt": prompt}
    if case.is_chat:
        path, content = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    return request(
        path,
        **content,
        max_tokens=case.n_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
        return_token_ids=True,
    )


def request(path: str, **fields: object) -> bytes:
    """Encodes a whole HTTP request."""
    body = json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class Reader(asyncio.Protocol):
    """A cheap client connection that only searches the bytes of chunks for time stamps and records their ages."""

    transport: asyncio.Transport
    _ids = re.compile(rb'"token_ids":\[([\d,]*)\]')

    def __init__(self, stats: ClientStats) -> None:
        self._stats = stats
        self._rest = b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    async def send(self, content: bytes) -> None:
        """Sends one request and waits for the end of its response."""
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        await self._ended

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        lines, _, self._rest = (self._rest + data).rpartition(b"\n")
        for match in self._ids.finditer(lines):
            self._record([int(token) for token in match[1].split(b",") if token], now_ns)
        if b"data: [DONE]" in lines or self._rest.endswith(b"}}}"):
            self._rest = b""
            self._ended.set_result(None)

    def _record(self, tokens: list[int], now_ns: int) -> None:
        """Records the tokens of a chunk."""
        self._stats.n_chunks += 1
        self._stats.ages_s += [age_s(token, now_ns) for token in tokens]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(SystemExit("a stream ended early; is the server running?"))


class FirstStampReader(Reader):
    """A connection whose answers' first tokens are the times at which the runtime received the requests."""

    _begun_ns: int | None = None
    """Start of the wave; None after the first token."""

    async def send_in_wave(self, begun_ns: int, content: bytes) -> None:
        """Sends one request of a wave, given the wave's start, and waits for the end of its response."""
        self._begun_ns = begun_ns
        await self.send(content)

    def _record(self, tokens: list[int], now_ns: int) -> None:
        if self._begun_ns is not None:
            received_s = (now_ns - self._begun_ns) / 1e9 - age_s(tokens.pop(0), now_ns)
            self._stats.submitted_s[-1].append(received_s)
            self._stats.first_tokens_s[-1].append((now_ns - self._begun_ns) / 1e9)
            self._begun_ns = None
        super()._record(tokens, now_ns)


class TailReader(Reader):
    """A connection that only looks for the end of a response, which may be long."""

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}}}"):
            self._ended.set_result(None)


ReaderT = TypeVar("ReaderT", bound=Reader)


async def connect(port: int, reader: ReaderT) -> ReaderT:
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    return reader


@asynccontextmanager
async def running_server(null_runtime_arguments: str, n_replicas: int) -> AsyncIterator[WatchedServer]:
    """Runs a server on a free port."""
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder) / "report"
        flags = ["--port", "0", "--stats-interval", "0", "--data-parallel-size", str(n_replicas)]
        process = await ChildProcess.start(
            [sys.executable, str(HERE / "watched_frontend.py"), str(report_file), null_runtime_arguments, *flags]
        )
        try:
            match = re.search(rb":(\d+) ", await process.read_line())
            if match is None:
                raise SystemExit("the server did not start; its reason is above")
            yield WatchedServer(process, int(match[1]), report_file)
        finally:
            await process.stop(STOP_LIMIT_S)


if __name__ == "__main__":
    main()
