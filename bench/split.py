"""Answers while long prompts arrive: prefill and decode split over two servers, beside two servers that do both.

Clients with short prompts each ask again as soon as they have an answer. Beside them long prompts of random
tokens, which share nothing, arrive at a fixed rate and get short answers. ``mixed`` sends each request to one of
the two servers by the rule of routers. ``split`` sends all requests to the second server; the first one computes
long prompts before, with ``max_tokens`` 0, and the servers share a store. Both get the same load from servers that
start anew.

Prints a JSON line for each mode: the time to the first token of short and of long prompts, the time between pieces
of answers to short ones, and tokens a second, all at the client; and where long prompts of ``split`` came from.

    python bench/split.py --output-file bench/results/split.jsonl
    python bench/split.py --device cuda --gpus 0 1 --model CONFIG_FOLDER --load-format dummy \\
        --host-memory 64GiB --streams 64 --long-tokens 16384 --interval-s 1 -- --max-num-batched-tokens 8192
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from result_lines import report, script_parser

from radixkv.client.errors import BadReply
from radixkv.client.events import EventReader
from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.processes.server_process import running_server
from radixkv.routing import ServerChoice

MODES = ("mixed", "split")
TOKENS_PER_ANSWER = 1024
"""Prompt tokens that weigh as much as an answer in the load of a server, as replicas count them."""


@dataclass
class Samples:
    """What the clients have measured."""

    short_ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Times between two pieces of answers to short prompts: with drafts a piece may have several tokens."""
    long_ttft_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    """Times of the first server's reply, when the store has the prompt."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens of long prompts by where the decoding server had them from."""
    n_tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """The clients of one mode.

    Args:
        args: sizes and rates.
        servers: two clients of HTTP; in mode ``split`` the first one computes and the second one decodes.
        vocab: token ids are below this.
        is_split: whether the mode is ``split``.
    """

    def __init__(self, args: argparse.Namespace, servers: list[HTTPClient], vocab: int, *, is_split: bool) -> None:
        self.samples = Samples()
        self._args = args
        self._servers = servers
        self._vocab = vocab
        self._is_split = is_split
        self._random = Random(args.seed)
        self._choice = ServerChoice[int]()
        self._load = [0.0, 0.0]

    async def run(self) -> float:
        """Runs for the time that was asked for, then until all requests have ended; returns the seconds."""
        started = time.perf_counter()
        end = started + self._args.seconds
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._args.streams):
                clients.create_task(self._ask_again(end))
            while time.perf_counter() < end:
                clients.create_task(self._ask_long())
                await asyncio.sleep(self._args.interval_s)
        return time.perf_counter() - started

    async def _ask_again(self, end: float) -> None:
        while time.perf_counter() < end:
            body = self._body(self._args.short_tokens, self._args.short_answer)
            times = await self._answered(body)
            if times:
                self.samples.short_ttft_s.append(times[1] - times[0])
                self.samples.gaps_s += [later - sooner for sooner, later in pairwise(times[1:])]

    async def _ask_long(self) -> None:
        body = self._body(self._args.long_tokens, self._args.long_answer)
        sent = time.perf_counter()
        if self._is_split:
            try:
                await self._servers[0].request("POST", "/v1/completions", _encoded({**body, "max_tokens": 0}))
            except BadReply as error:  # the decoding server computes it
                self.samples.errors.append(str(error))
            self.samples.prefill_s.append(time.perf_counter() - sent)
        times = await self._answered(body, self.samples.sources)
        if times:
            self.samples.long_ttft_s.append(times[1] - sent)

    def _body(self, n_prompt: int, n_answer: int) -> dict[str, Any]:
        prompt = [self._random.randrange(self._vocab) for _ in range(n_prompt)]
        return {"prompt": prompt, "max_tokens": n_answer, "ignore_eos": True, "temperature": 0}

    async def _answered(self, body: dict[str, Any], sources: Counter[str] | None = None) -> list[float]:
        """Returns when a request was sent, and when each piece of its answer came; nothing if it failed."""
        n_prompt, server = len(body["prompt"]), 1
        if not self._is_split:
            in_flight = dict(enumerate(self._load))
            server = self._choice.choose(n_prompt, {0: 0, 1: 0}, in_flight, time.perf_counter())
        weight = 1 + n_prompt / TOKENS_PER_ANSWER
        self._load[server] += weight
        times, events = [time.perf_counter()], EventReader()
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        try:
            async for piece in self._servers[server].stream("/v1/completions", _encoded({**body, **options})):
                now, n_tokens = time.perf_counter(), 0
                for event in events.push(piece):
                    if event != b"[DONE]":
                        chunk = json.loads(event)
                        n_tokens += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
                        _count_sources(chunk, sources)
                self.samples.n_tokens += n_tokens
                times += [now] * (n_tokens > 0)
        except BadReply as error:
            self.samples.errors.append(str(error))
            return []
        finally:
            self._load[server] -= weight
        return times if len(times) > 1 else []


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _count_sources(chunk: dict[str, Any], sources: Counter[str] | None) -> None:
    """Counts where the tokens of a prompt came from, which the last chunk says."""
    if sources is None or not chunk.get("usage") or "prompt_tokens_details" not in chunk["usage"]:
        return
    details = chunk["usage"]["prompt_tokens_details"]
    sources.update(details.get("cached_tokens_details") or {})
    sources["computed"] += chunk["usage"]["prompt_tokens"] - details["cached_tokens"]


def summary(samples: Samples, seconds: float) -> dict[str, Any]:
    """Returns percentiles in milliseconds, rates and counts."""
    line: dict[str, Any] = {}
    for name in ("short_ttft", "gaps", "long_ttft", "prefill"):
        values = sorted(getattr(samples, f"{name}_s"))
        for percent in (50, 90, 99, 100) if values else ():
            line[f"{name}_ms_p{percent}"] = round(1e3 * (percentile(values, percent) or 0.0), 2)
        line[f"n_{name}"] = len(values)
    return line | {
        "output_tokens_per_s": round(samples.n_tokens / seconds, 2),
        "failed": len(samples.errors),
        "errors": samples.errors[:3],
        "long_prompt_tokens_from": dict(samples.sources),
    }


async def measure(args: argparse.Namespace, mode: str, store: str) -> dict[str, Any]:
    """Starts both servers, runs the load once to warm them up and once to measure; returns the line."""
    flags = ["--model", args.model, "--device", args.device, "--grammar-backend", "none", *args.flags]
    if args.load_format is not None:
        flags += ["--load-format", args.load_format]
    if mode == "split":
        flags += ["--host-memory", args.host_memory, "--load-policy", args.load_policy, "--cache-url", store]
    more = [args.first_flags.split(), args.second_flags.split()] if mode == "split" else [[], []]
    async with AsyncExitStack() as stack:
        servers = []
        for index in range(2):
            variables = {"OMP_NUM_THREADS": str(args.threads)} if args.device == "cpu" else {}
            if args.gpus:
                variables["CUDA_VISIBLE_DEVICES"] = args.gpus[index]
            address = await stack.enter_async_context(running_server([*flags, *more[index]], environment=variables))
            servers.append(await stack.enter_async_context(HTTPClient(address)))
        warm = argparse.Namespace(**{**vars(args), "seconds": args.warm_up_s, "seed": args.seed + 1})
        vocab = json.loads(await servers[0].request("GET", "/model_info"))["vocab_size"]
        await Load(warm, servers, vocab, is_split=mode == "split").run()
        load = Load(args, servers, vocab, is_split=mode == "split")
        seconds = await load.run()
    if not (load.samples.gaps_s and load.samples.long_ttft_s):
        sys.exit(f"nothing is measured: {load.samples.errors[:1] or 'run it longer'}")
    return summary(load.samples, seconds)


async def main() -> None:
    """Measures both modes, in turn, as often as asked."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--load-format", help="dummy for a model without weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--gpus", nargs=2, metavar="GPU", help="of the two servers, as CUDA_VISIBLE_DEVICES names them"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a server on the CPU (default: 1)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=1, help="of all modes, in turn")
    parser.add_argument("--store", metavar="URL", help="the shared store (default: a new folder, in memory)")
    parser.add_argument("--host-memory", default="256MiB")
    parser.add_argument("--load-policy", choices=("auto", "always"), default="auto")
    parser.add_argument("--streams", type=int, default=4, help="clients with short prompts")
    parser.add_argument("--short-tokens", type=int, default=64)
    parser.add_argument("--short-answer", type=int, default=64)
    parser.add_argument("--long-tokens", type=int, default=2048)
    parser.add_argument("--long-answer", type=int, default=16)
    parser.add_argument("--interval-s", type=float, default=4.0, help="between two long prompts")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-flags", default="", help="of the server that computes, in one text")
    parser.add_argument("--second-flags", default="", help="of the server that decodes")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of both servers, after --")
    args = parser.parse_args()
    about = provenance()
    settings = {name: value for name, value in vars(args).items() if name not in ("output_file", "modes", "rounds")}
    for _ in range(args.rounds):
        for mode in args.modes:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                line = await measure(args, mode, args.store or f"file://{folder}/kv")
            report(args.output_file, {"benchmark": "split", "mode": mode, **line, "settings": settings}, about)


if __name__ == "__main__":
    asyncio.run(main())
