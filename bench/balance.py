"""How evenly bursts of prompts are spread over the replicas of one server, in virtual time.

The prompts are those of `bench/gpu_server.py`, tokenized, and replicas are chosen by the product's own `Placement`.
Everything else is modelled: clients that send again once they are answered; a frontend that does one thing after
another; and replicas that wait for prefixes which another request computes, and take as long for a step as an 8B
model on an H200 (`StepTime`). So a run is exact, and the same on a busy machine.

Appends one JSON line for each workload: tokens/s, and their ratio to those of one replica with as many prompts and
clients for each; the prompts and tokens that each replica got, why, and how many of its prompt tokens it computed.

    python bench/balance.py --output-file bench/results/balance.jsonl
    python bench/balance.py --request-us 0 --token-us 0       # with a frontend that takes no time
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import xxhash
from gpu_server import load_benchmark
from result_lines import report, script_parser

from radixkv.checkpoints.resolve import resolve_tokenizer
from radixkv.frontend.replicas.placement import Placement
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.lab.bench.session import Reply
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Matched, TierMatch
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

PAGE_BYTES = 64
"""16 tokens."""


@dataclass(frozen=True)
class StepTime:
    """How long a step takes: of an 8B model in bfloat16 on an H200, fitted to `bench/results/gpu_server.jsonl`."""

    fixed_s: float = 0.006
    row_s: float = 20e-6
    """For each row that generates a token."""
    prompt_token_s: float = 27e-6
    launch_s: float = 0.004
    """The end of a step, in which the host plans and launches the next one, and takes no messages."""
    answer_s: float = 50e-6
    """The frontend's time for an answer to a question."""
    max_tokens: int = 2048
    """Most tokens of a step."""
    max_rows: int = 512


@dataclass
class Prompt:
    """A prompt in flight."""

    submit: Submit
    n_output: int
    pages: Sequence[int]
    """Chained digests of its whole pages."""
    is_answered: asyncio.Future[None]
    first_token_s: float = 0.0
    n_left: int = 0
    """Prompt tokens that are still to be computed."""
    n_generated: int = 0


class VirtualTime(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that does not wait: the loop's time goes on instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Moves the time by ``timeout`` instead of waiting."""
        assert timeout is not None, "everything waits for something else"
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def __init__(self) -> None:
        self._virtual = VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._virtual.now_s


class Frontend:
    """Does one thing after another, in the order in which they come.

    Args:
        request_s: its time for a request.
        token_s: its time for a token that a client is sent.
    """

    def __init__(self, request_s: float, token_s: float) -> None:
        self.request_s = request_s
        self.token_s = token_s
        self.busy_s = 0.0
        self._free_at = 0.0

    async def work(self, seconds: float) -> None:
        """Returns when it has worked so long, after what it was given before."""
        now_s = asyncio.get_running_loop().time()
        self._free_at = max(now_s, self._free_at) + seconds
        self.busy_s += seconds
        await asyncio.sleep(self._free_at - now_s)


@dataclass
class ModelledReplica:
    """A replica whose steps take modelled times. It never evicts."""

    frontend: Frontend
    times: StepTime
    n_in_flight: int = 0
    empty_since: float = 0.0
    n_prompts: int = 0
    n_prompt_tokens: int = 0
    n_computed: int = 0
    n_generated: int = 0
    busy_s: float = 0.0
    _deaf_from_s: float = 0.0
    _questions: list[tuple[Sequence[bytes], asyncio.Future[Matched]]] = field(default_factory=list)
    _waiting: deque[Prompt] = field(default_factory=deque)
    _running: list[Prompt] = field(default_factory=list)
    _cached: set[int] = field(default_factory=set)
    _under_way: set[int] = field(default_factory=set)
    """Pages that running prompts compute."""
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def match(self, prompts: Sequence[bytes], cache_salt: str, *, tenant: str) -> Matched:
        """Answers at once while the device computes, else when the next step is launched."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Matched] = loop.create_future()
        self._questions.append((prompts, answer))
        self._woken.set()
        if loop.time() < self._deaf_from_s:
            self._answer()
        matched = await answer
        await self.frontend.work(self.times.answer_s)
        return matched

    def send(self, prompt: Prompt) -> None:
        """Takes a prompt."""
        self.n_in_flight += 1
        self.n_prompts += 1
        self.n_prompt_tokens += len(prompt.submit.tokens) // 4
        self._waiting.append(prompt)
        self._woken.set()

    async def run(self) -> None:
        """Computes steps until it is cancelled."""
        while True:
            self._answer()
            if not (self._waiting or self._running):
                self._woken.clear()
                await self._woken.wait()
                continue
            n_prompt_tokens, rows = self._plan()
            step_s = self.times.fixed_s + self.times.row_s * len(rows) + self.times.prompt_token_s * n_prompt_tokens
            self.busy_s += step_s
            self._deaf_from_s = asyncio.get_running_loop().time() + step_s - self.times.launch_s
            self._answer()
            await asyncio.sleep(step_s)
            self._finish(rows)

    def _answer(self) -> None:
        for prompts, answer in self._questions:
            if not answer.done():
                one = [
                    TierMatch(len(tokens) // 4, 16 * n_leading(pages_of(tokens), self._cached), 0, 0)
                    for tokens in prompts
                ]
                answer.set_result(Matched("", tuple(one), 0, 0, 0, 0))
        self._questions.clear()

    def _plan(self) -> tuple[int, list[Prompt]]:
        """Admits prompts; returns the prompt tokens of the step, and the prompts that it gives a token."""
        room = self.times.max_tokens - sum(not prompt.n_left for prompt in self._running)
        n_planned = 0
        self._admit(self.times.max_rows - len(self._running), room)
        for prompt in self._running:
            n_now = min(prompt.n_left, room - n_planned)
            prompt.n_left -= n_now
            n_planned += n_now
        self.n_computed += n_planned
        return n_planned, [prompt for prompt in self._running if not prompt.n_left]

    def _admit(self, n_free_rows: int, room: int) -> None:
        room -= sum(prompt.n_left for prompt in self._running)
        later: deque[Prompt] = deque()
        while self._waiting and n_free_rows > 0 and room > 0:
            prompt = self._waiting.popleft()
            n_cached = n_leading(prompt.pages, self._cached)
            if n_cached < len(prompt.pages) and prompt.pages[n_cached] in self._under_way:
                later.append(prompt)  # another one computes its next page
                continue
            prompt.n_left = len(prompt.submit.tokens) // 4 - min(16 * n_cached, len(prompt.submit.tokens) // 4 - 1)
            self._under_way.update(prompt.pages[n_cached:])
            self._running.append(prompt)
            room -= prompt.n_left
            n_free_rows -= 1
        self._waiting.extendleft(reversed(later))

    def _finish(self, rows: Sequence[Prompt]) -> None:
        for prompt in rows:
            self._cached.update(prompt.pages)
            self._under_way.difference_update(prompt.pages)
            prompt.n_generated += 1
            self.n_generated += 1
            if prompt.n_generated == prompt.n_output:
                self._running.remove(prompt)
                self.n_in_flight -= 1
            asyncio.ensure_future(self._deliver(prompt, prompt.n_generated))  # noqa: RUF006

    async def _deliver(self, prompt: Prompt, n_generated: int) -> None:
        await self.frontend.work(self.frontend.token_s)
        if n_generated == 1:
            prompt.first_token_s = asyncio.get_running_loop().time()
        if n_generated == prompt.n_output:
            prompt.is_answered.set_result(None)


def pages_of(tokens: bytes) -> list[int]:
    """Returns the chained digests of a prompt's whole pages. O(tokens)."""
    state, pages = xxhash.xxh3_64(), []
    for start in range(0, len(tokens) - PAGE_BYTES + 1, PAGE_BYTES):
        state.update(tokens[start : start + PAGE_BYTES])
        pages.append(state.intdigest())
    return pages


def n_leading(pages: Sequence[int], known: set[int]) -> int:
    """Returns how many pages from the first on are known."""
    return next((n for n, page in enumerate(pages) if page not in known), len(pages))


@dataclass
class Server:
    """Replicas behind a frontend."""

    frontend: Frontend
    replicas: Mapping[int, ModelledReplica]
    placement: Placement

    async def complete(self, tokens: bytes, n_output: int, number: int) -> tuple[float, float]:
        """Answers a prompt; returns when it was sent, and when its first token came."""
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        await self.frontend.work(self.frontend.request_s)
        submit = Submit(str(number), tokens, SamplingParams(max_tokens=n_output))
        found = await self.placement.probe(self.replicas, [submit])
        chosen = self.placement.choose(submit, self.replicas, {index: one[0] for index, one in found.items()})
        prompt = Prompt(submit, n_output, pages_of(tokens), loop.create_future())
        self.replicas[chosen].send(prompt)
        await prompt.is_answered
        return sent_s, prompt.first_token_s


def chats_of(workload: str, scale: int, tokenizer: Tokenizer) -> list[list[tuple[bytes, int]]]:
    """Returns the prompts of each session of a workload, tokenized, and the lengths of their answers."""
    chats = []
    for session in load_benchmark(workload, False, scale).sessions:
        turns, chat = session.turns(), []
        requests = next(turns, None)
        while requests is not None:
            (request,) = requests
            assert isinstance(request.prompt, str)
            chat.append((tokenizer.encode(request.prompt), request.output_len))
            try:
                requests = turns.send([Reply(("",))])
            except StopIteration:
                requests = None
        chats.append(chat)
    return chats


async def run_clients(server: Server, chats: Sequence[Sequence[tuple[bytes, int]]], n_clients: int) -> list[float]:
    """Sends all prompts; returns the times to the first token. Each client takes the next chat once it is free."""
    waiting, numbers = iter(chats), itertools.count()
    times_s = []

    async def client() -> None:
        for chat in waiting:
            for tokens, n_output in chat:
                sent_s, first_token_s = await server.complete(tokens, n_output, next(numbers))
                times_s.append(first_token_s - sent_s)

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return times_s


async def measure(chats: Any, n_clients: int, n_replicas: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all prompts with so many replicas; returns what the line says of them."""
    loop = asyncio.get_running_loop()
    frontend = Frontend(arguments.request_us / 1e6, arguments.token_us / 1e6)
    replicas = {index: ModelledReplica(frontend, StepTime()) for index in range(n_replicas)}
    server = Server(frontend, replicas, Placement(clock=loop.time))
    running = [asyncio.create_task(replica.run()) for replica in replicas.values()]
    times_s = await run_clients(server, chats, n_clients)
    duration_s = loop.time()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    milliseconds = sorted(1e3 * one for one in times_s)
    n_computed = sum(replica.n_computed for replica in replicas.values())
    n_prompt = sum(replica.n_prompt_tokens for replica in replicas.values())
    return {
        "duration_s": round(duration_s, 3),
        "tokens_per_s": round(sum(replica.n_generated for replica in replicas.values()) / duration_s),
        "mean_ttft_ms": round(mean(milliseconds), 1),
        "p99_ttft_ms": round(percentile(milliseconds, 99) or 0.0, 1),
        "frontend_busy_pct": round(100 * frontend.busy_s / duration_s, 1),
        "hit_rate_pct": round(100 * (1 - n_computed / n_prompt), 2),
        "replicas": [
            {
                "prompts": replica.n_prompts,
                "prompt_tokens": replica.n_prompt_tokens,
                "computed_tokens": replica.n_computed,
                "busy_pct": round(100 * replica.busy_s / duration_s, 1),
                "reasons": {why: n for why, n in server.placement.n_placed(index).items() if n},
            }
            for index, replica in replicas.items()
        ],
    }


def in_virtual_time(chats: Any, n_clients: int, n_replicas: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs ``measure`` in a loop of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure(chats, n_clients, n_replicas, arguments))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--workloads", default="fewshot,multiturn,unshared", metavar="NAMES", help="comma-separated"
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="COUNT")
    parser.add_argument("--request-us", type=float, default=900.0, help="the frontend's time for a request")
    parser.add_argument("--token-us", type=float, default=30.0, help="its time for a streamed token")
    parser.add_argument("--note", help="text to add to each line")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_tokenizer("tiny"))
    for workload in arguments.workloads.split(","):
        bench = load_benchmark(workload, False, 1)
        alone = in_virtual_time(chats_of(workload, 1, tokenizer), bench.workload.max_concurrency, 1, arguments)
        n_clients = bench.workload.max_concurrency * arguments.replicas
        chats = chats_of(workload, arguments.replicas, tokenizer)
        together = in_virtual_time(chats, n_clients, arguments.replicas, arguments)
        ratio = together["tokens_per_s"] / alone["tokens_per_s"]
        line = {
            "bench": "balance",
            "workload": workload,
            "request_us": arguments.request_us,
            "token_us": arguments.token_us,
            "one": alone,
            "ratio": round(ratio, 3),
            **together,
        }
        report(arguments.output_file, line | ({"note": arguments.note} if arguments.note else {}), provenance())


if __name__ == "__main__":
    main()
