"""How evenly bursts of prompts are spread over the replicas of one server, in virtual time.

The prompts are those of `bench/gpu_server.py`, tokenized, and replicas are chosen by the product's own `Placement`.
Everything else is modelled: clients that send again once they are answered; a frontend that does one thing after
another; and replicas that wait for prefixes which another request computes, and take as long for a step as an 8B
model on an H200 (`modelled_steps.py`). So a run is exact, and the same on a busy machine.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any

from gpu_server import load_benchmark
from modelled_steps import ModelledSteps
from result_lines import report, script_parser

from radixkv.checkpoints.resolve import resolve_tokenizer
from radixkv.frontend.replicas.placement import Placement
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.lab.bench.session import Reply
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Matched, TierMatch
from radixkv.wire.messages import Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams

LAUNCH_S = 0.004
"""The end of a step, in which a runtime's host plans and launches the next one, and takes no messages."""
ANSWER_S = 50e-6
"""The frontend's time for an answer of a replica to a question."""


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

    def end_of(self, seconds: float) -> float:
        """Gives it work; returns when it has done that, after what it was given before."""
        self._free_at = max(asyncio.get_running_loop().time(), self._free_at) + seconds
        self.busy_s += seconds
        return self._free_at

    async def work(self, seconds: float) -> None:
        """Returns when it has done work that takes so long."""
        await asyncio.sleep(self.end_of(seconds) - asyncio.get_running_loop().time())


@dataclass
class ModelledReplica:
    """A replica whose steps take modelled times."""

    frontend: Frontend
    steps: ModelledSteps = field(default_factory=ModelledSteps)
    load: float = 0.0
    empty_since: float = 0.0
    busy_s: float = 0.0
    _takes_until_s: float = 0.0
    """Until when it takes messages at once, because the device computes."""
    _questions: list[tuple[Sequence[bytes], asyncio.Future[Matched]]] = field(default_factory=list)
    _answered: dict[int, tuple[asyncio.Future[float], asyncio.Future[None], float]] = field(default_factory=dict)
    """For each prompt, by its identity: when its first token came, whether all have, and its load."""
    _has_more: asyncio.Event = field(default_factory=asyncio.Event)

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """Answers at once while the device computes, else when the next step is launched."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Matched] = loop.create_future()
        self._questions.append((prompts, answer))
        self._has_more.set()
        if loop.time() < self._takes_until_s:
            self._answer()
        matched = await answer
        await self.frontend.work(ANSWER_S)
        return matched

    async def complete(self, tokens: bytes, n_output: int, load: float) -> float:
        """Answers a prompt, which adds to its load; returns when the client got its first token."""
        loop = asyncio.get_running_loop()
        self.load += load
        prompt = self.steps.add(tokens, n_output)
        first, last = loop.create_future(), loop.create_future()
        self._answered[id(prompt)] = first, last, load
        self._has_more.set()
        await last
        return await first

    async def run(self) -> None:
        """Computes steps until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._answer()
            if not self.steps.has_work:
                self._has_more.clear()
                await self._has_more.wait()
                continue
            step_s, rows = self.steps.plan()
            self.busy_s += step_s
            self._takes_until_s = loop.time() + step_s - LAUNCH_S
            await asyncio.sleep(step_s)
            self.steps.finish(rows)
            for prompt in rows:
                is_last = prompt.n_generated == prompt.n_output
                first, last, load = self._answered[id(prompt)]
                self._deliver(first, last, is_last=is_last)
                if is_last:
                    self.load -= load
                    del self._answered[id(prompt)]

    def _answer(self) -> None:
        for prompts, answer in self._questions:
            if not answer.done():
                matches = [TierMatch(len(tokens) // 4, self.steps.n_cached(tokens), 0, 0) for tokens in prompts]
                answer.set_result(Matched("", tuple(matches), 0, 0, 0, 0))
        self._questions.clear()

    def _deliver(self, first: asyncio.Future[float], last: asyncio.Future[None], *, is_last: bool) -> None:
        """Lets the frontend send a token."""
        loop = asyncio.get_running_loop()

        def deliver() -> None:
            if not first.done():
                first.set_result(loop.time())
            if is_last:
                last.set_result(None)

        loop.call_at(self.frontend.end_of(self.frontend.token_s), deliver)


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
        chosen, load = self.placement.choose(submit, self.replicas, {index: one[0] for index, one in found.items()})
        return sent_s, await self.replicas[chosen].complete(tokens, n_output, load)


Chat = list[tuple[bytes, int]]
"""The prompts of a session, as little-endian int32 ids, and how long their answers are."""


def groups(scale: int, rng: Random) -> list[Chat]:
    """Returns few-shot prompts of three groups, one of which has half of them."""
    shared = [_ids(rng, 910) for _ in range(3)]
    return [[(shared[rng.choice((0, 0, 1, 2))] + _ids(rng, 70), 32)] for _ in range(768 * scale)]


def lengths(scale: int, rng: Random) -> list[Chat]:
    """Returns prompts that share nothing, of which a quarter are 20 times as long as the others."""
    return [[(_ids(rng, rng.choice((200, 200, 200, 4000))), 64)] for _ in range(384 * scale)]


def sessions(scale: int, rng: Random) -> list[Chat]:
    """Returns chats of 1 to 12 turns, which grow by 100 to 700 tokens with each."""
    chats: list[Chat] = []
    system = _ids(rng, 100)
    for _ in range(256 * scale):
        history, chat = system, []
        for _ in range(rng.randint(1, 12)):
            history += _ids(rng, rng.randint(100, 700))
            chat.append((history, 64))
        chats.append(chat)
    return chats


def documents(scale: int, rng: Random) -> list[Chat]:
    """Returns prompts that share nothing: short ones, and among them documents, a sixteenth of all."""
    return [[(_ids(rng, 30_000 if rng.random() < 1 / 16 else 200), 64)] for _ in range(200 * scale)]


def _ids(rng: Random, n: int) -> bytes:
    return rng.randbytes(4 * n)


MADE = {
    "groups": (groups, 256),
    "lengths": (lengths, 128),
    "sessions": (sessions, 128),
    "documents": (documents, 16),
}
"""Workloads of this script, and their numbers of clients."""


def chats_of(workload: str, scale: int, seed: int, tokenizer: Tokenizer) -> tuple[list[Chat], int]:
    """Returns the sessions of a workload, and how many clients send them."""
    if workload in MADE:
        make, n_clients = MADE[workload]
        return make(scale, Random(seed)), n_clients * scale
    bench = load_benchmark(workload, False, scale)
    chats = []
    for session in bench.sessions:
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
    return chats, bench.workload.max_concurrency or 1


async def run_clients(
    server: Server, chats: Sequence[Chat], n_clients: int, rate: float | None, rng: Random
) -> list[float]:
    """Sends all prompts; returns the times to the first token.

    Args:
        server: gets them.
        chats: the sessions.
        n_clients: each takes the next session once it is free.
        rate: sessions that start per second, as a Poisson process, instead of clients; None: clients.
        rng: of the arrivals.
    """
    waiting, numbers = iter(chats), itertools.count()
    times_s = []

    async def client(n_chats: int) -> None:
        for chat in itertools.islice(waiting, n_chats):
            for tokens, n_output in chat:
                sent_s, first_token_s = await server.complete(tokens, n_output, next(numbers))
                times_s.append(first_token_s - sent_s)

    async def arrive(at_s: float) -> None:
        await asyncio.sleep(at_s)
        await client(1)

    if rate is None:
        await asyncio.gather(*(client(len(chats)) for _ in range(n_clients)))
    else:
        gaps = (rng.expovariate(rate) for _ in chats)
        await asyncio.gather(*map(arrive, itertools.accumulate(gaps)))
    return times_s


async def measure(
    chats: Sequence[Chat], n_clients: int, n_replicas: int, arguments: argparse.Namespace, rate: float | None = None
) -> dict[str, Any]:
    """Runs all prompts with so many replicas; returns what the line says of them."""
    loop = asyncio.get_running_loop()
    frontend = Frontend(arguments.request_us / 1e6, arguments.token_us / 1e6)
    replicas = {index: ModelledReplica(frontend) for index in range(n_replicas)}
    server = Server(frontend, replicas, Placement(clock=loop.time))
    running = [asyncio.create_task(replica.run()) for replica in replicas.values()]
    times_s = await run_clients(server, chats, n_clients, rate, Random(arguments.seed))
    duration_s = loop.time()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    milliseconds = sorted(1e3 * one for one in times_s)
    n_computed = sum(replica.steps.n_computed for replica in replicas.values())
    n_prompt = sum(replica.steps.n_prompt_tokens for replica in replicas.values())
    return {
        "duration_s": round(duration_s, 3),
        "chats_per_s": round(len(chats) / duration_s, 2),
        "tokens_per_s": round(sum(replica.steps.n_generated for replica in replicas.values()) / duration_s),
        "mean_ttft_ms": round(mean(milliseconds), 1),
        "p99_ttft_ms": round(percentile(milliseconds, 99) or 0.0, 1),
        "frontend_busy_pct": round(100 * frontend.busy_s / duration_s, 1),
        "hit_rate_pct": round(100 * (1 - n_computed / n_prompt), 2),
        "replicas": [
            {
                "prompts": replica.steps.n_prompts,
                "prompt_tokens": replica.steps.n_prompt_tokens,
                "computed_tokens": replica.steps.n_computed,
                "busy_pct": round(100 * replica.busy_s / duration_s, 1),
                "reasons": {why: n for why, n in server.placement.n_placed(index).items() if n},
            }
            for index, replica in replicas.items()
        ],
    }


def in_virtual_time(
    chats: Sequence[Chat], n_clients: int, n_replicas: int, arguments: argparse.Namespace, rate: float | None = None
) -> dict[str, Any]:
    """Runs ``measure`` in a loop of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure(chats, n_clients, n_replicas, arguments, rate))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--workloads", default="fewshot,multiturn,unshared", metavar="NAMES", help="comma-separated"
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="COUNT")
    parser.add_argument("--request-us", type=float, default=900.0, help="the frontend's time for a request")
    parser.add_argument("--token-us", type=float, default=30.0, help="its time for a streamed token")
    parser.add_argument(
        "--rate-pct",
        type=float,
        metavar="PERCENT",
        help="Poisson arrivals, at this share of the rate of all replicas",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", help="text to add to each line")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_tokenizer("tiny"))
    for workload in arguments.workloads.split(","):
        alone = in_virtual_time(*chats_of(workload, 1, arguments.seed, tokenizer), 1, arguments)
        chats, n_clients = chats_of(workload, arguments.replicas, arguments.seed, tokenizer)
        rate = None
        if arguments.rate_pct is not None:
            rate = arguments.rate_pct / 100 * arguments.replicas * alone["chats_per_s"]
            alone = in_virtual_time(*chats_of(workload, 1, arguments.seed, tokenizer), 1, arguments, rate / 2)
        together = in_virtual_time(chats, n_clients, arguments.replicas, arguments, rate)
        ratio = together["tokens_per_s"] / alone["tokens_per_s"]
        line = {
            "bench": "balance",
            "workload": workload,
            "seed": arguments.seed,
            "rate_pct": arguments.rate_pct,
            "request_us": arguments.request_us,
            "token_us": arguments.token_us,
            "one": alone,
            "ratio": round(ratio, 3),
            **together,
        }
        report(arguments.output_file, line | ({"note": arguments.note} if arguments.note else {}), provenance())


if __name__ == "__main__":
    main()
