"""Requests that find their pages in host memory or on disk while they wait, with and without loads ahead.

Time is virtual. Chats of several turns share a pool that holds a part of them; the rest is in host memory, or
on disk with ``--disk-pages`` and few ``--host-pages``. Scheduler, caches and tiers are the server's. The times
of steps are those of ``StepTime``, an 8B model in bfloat16 on an H200; copies take a time a page, one
after another. Prints a JSON line for each ``--window``, the prompts that are looked at in a round (0: nothing
is loaded ahead): time to first token, throughput, tokens that were cached and loaded, and pages that were
loaded ahead and of use.

``--queue N`` measures what it costs instead: the processor time of a turn of the tiers while N requests wait that
have nothing to load.

    python bench/load_ahead.py --output-file bench/results/load_ahead.jsonl
    python bench/load_ahead.py --name "few rows" --rows 2 --rate 1.2 --link-gb 5 --horizon-s 100
    python bench/load_ahead.py --queue 1000 --turn-tokens 512
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections import deque
from heapq import heappop, heappush
from random import Random
from typing import Any

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.step_time import StepTime
from radixkv.lab.simulator.virtual_time import Clock, TimedCopier, TimedStore
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.tiers import load_ahead
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
VOCAB = 100_000


class Engine:
    """Scheduler, caches and tiers of a server, whose steps and copies take virtual time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.clock = Clock()
        self.times = StepTime(arguments.step_ms / 1e3, prompt_token_s=arguments.prompt_token_us / 1e6)
        self.cache = PageCache(arguments.pages, PAGE_SIZE)
        host = PageCache(arguments.host_pages, PAGE_SIZE)
        cost, n_measured = LoadCost(), 1 << 20
        page_bytes = int(arguments.page_mib * (1 << 20))
        page_s, disk_page_s = (page_bytes / (gb * 1e9) for gb in (arguments.link_gb, arguments.disk_gb))
        cost.add_load(n_measured, n_measured / PAGE_SIZE * page_s)
        cost.fetch_rate(0).add(n_measured, n_measured / PAGE_SIZE * disk_page_s)
        cost.add_step(n_measured, n_measured, n_measured * self.times.prompt_token_s)
        copier, disk = TimedCopier(self.clock, page_bytes, page_s), None
        if arguments.disk_pages:
            store = TimedStore(self.clock, arguments.disk_pages, page_bytes, disk_page_s)
            disk = StorageTier(host, [store], bytes(KEY_BYTES), copier.buffer, cost)
        self.host_tier = HostTier(self.cache, host, copier, disk, LoadChoice(cost=cost))
        limits = SchedulerLimits(
            max_num_seqs=arguments.rows, max_num_batched_tokens=arguments.step_tokens, max_queued_requests=1 << 20
        )
        self.scheduler: Scheduler = open_scheduler(
            self.cache,
            limits,
            schedule_policy=arguments.policy,
            host_tier=self.host_tier,
            loads_ahead=True,
            clock=lambda: self.clock.now,
        )
        self.launched: deque[StepPlan] = deque()
        self.first_token: dict[Request, float] = {}
        self.n_steps = 0

    def turn(self) -> list[Request]:
        """Plans a step and takes the result of the one before; returns the requests that have ended."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.launched.append(plan)
        if not self.launched or (len(self.launched) == 1 and plan is not None):
            return []
        oldest = self.launched.popleft()
        self.clock.now += self.times.seconds(oldest.n_prompt_tokens, len(oldest.rows))
        self.n_steps += 1
        tokens = tuple(5 if row.sampling is not None else -1 for row in oldest.rows)
        updates = self.scheduler.complete(oldest, StepResult(tokens, (True,) * len(tokens)))
        for update in updates:
            if update.tokens:
                self.first_token.setdefault(update.request, self.clock.now)
        return [update.request for update in updates if update.finish_reason is not None]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--chats", type=int, default=240)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-tokens", type=int, default=1200, help="half of it to one and a half")
    parser.add_argument("--output-tokens", type=int, default=150, help="half of it to one and a half")
    parser.add_argument("--think-s", type=float, default=20.0, help="mean time between an answer and the next turn")
    parser.add_argument("--rate", type=float, default=4.0, help="new chats a second")
    parser.add_argument("--horizon-s", type=float, default=1e9, help="end of the run, whatever waits then")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--pages", type=int, default=16_384, help="of the device")
    parser.add_argument("--host-pages", type=int, default=262_144)
    parser.add_argument("--disk-pages", type=int, default=0)
    parser.add_argument("--link-gb", type=float, default=20.0, help="GB/s of loads and of stores")
    parser.add_argument("--disk-gb", type=float, default=2.0, help="GB/s of fetches")
    parser.add_argument("--page-mib", type=float, default=2.0, help="16 tokens of an 8B model with 8 KV heads")
    parser.add_argument("--prompt-token-us", type=float, default=27.0, help="time of a prompt's token")
    parser.add_argument("--step-ms", type=float, default=6.0, help="time of a step beside its tokens")
    parser.add_argument("--policy", choices=("lpm", "fcfs"), default="lpm")
    parser.add_argument("--window", type=int, action="append", help="may occur several times (default: 0 and 32)")
    parser.add_argument("--queue", type=int, default=0)
    parser.add_argument("--name", default="chats", help="of the case, for the JSON line")
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output_file", "window")}
    for window in arguments.window or (0, load_ahead.WINDOW):
        load_ahead.WINDOW = window
        line = measure_turns(arguments) if arguments.queue else simulate(arguments)
        report(
            arguments.output_file, {"case": arguments.name, "window": window, **line}, {**settings, **provenance()}
        )


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serves all chats; equal arguments give equal ones."""
    rng = Random(7)
    engine = Engine(arguments)
    arrivals: list[tuple[float, int, int, bytearray, int]] = []
    """Time, chat, turn, prompt and length of the answer."""
    at = 0.0
    for chat in range(arguments.chats):
        at += rng.expovariate(arguments.rate)
        rng_of_chat = Random(chat)
        arrivals.append((at, chat, 0, _tokens(rng_of_chat, arguments.turn_tokens), 0))
    arrivals.sort(key=lambda one: one[0])
    chat_of: dict[Request, tuple[int, int]] = {}
    received: dict[Request, float] = {}
    random_of = {chat: Random(-1 - chat) for chat in range(arguments.chats)}
    done: list[Request] = []
    while (arrivals or chat_of) and engine.clock.now < arguments.horizon_s:
        while arrivals and arrivals[0][0] <= engine.clock.now:
            at, chat, turn, prompt, _ = heappop(arrivals)
            n_output = _around(random_of[chat], arguments.output_tokens)
            request = Request(
                id=f"{chat}.{turn}",
                namespace=Namespace(),
                known_key=prompt,
                n_prompt=len(prompt) // 4,
                max_tokens=n_output,
                received_at=at,
            )
            chat_of[request], received[request] = (chat, turn), at
            engine.scheduler.add(request)
        before = engine.clock.now
        for request in engine.turn():
            chat, turn = chat_of.pop(request)
            engine.scheduler.tiers.ended((request,))
            done.append(request)
            if turn + 1 < arguments.turns:
                think_s = random_of[chat].expovariate(1 / arguments.think_s)
                prompt = bytearray(request.known_key) + _tokens(random_of[chat], arguments.turn_tokens)
                heappush(arrivals, (engine.clock.now + think_s, chat, turn + 1, prompt, 0))
        if engine.clock.now == before and not engine.launched:
            events = [
                time_s for time_s in (engine.clock.next_end(), arrivals[0][0] if arrivals else None) if time_s
            ]
            engine.clock.now = max(engine.clock.now, min(events)) if events else engine.clock.now
    engine.scheduler.check()
    ttft = sorted(at - received[request] for request, at in engine.first_token.items())
    uses = [use for request in done if (use := request.cache_use.counted) is not None]
    n_prompt, n_output = sum(one.n_prompt for one in done), sum(one.n_outputs for one in engine.first_token)
    host, *_ = engine.scheduler.tiers.stats()
    assert host is not None
    return {
        "requests": len(done),
        "ttft_p50_s": round(ttft[len(ttft) // 2], 4),
        "ttft_p99_s": round(ttft[len(ttft) * 99 // 100], 4),
        "ttft_mean_s": round(sum(ttft) / len(ttft), 4),
        "seconds": round(engine.clock.now, 2),
        "output_tokens_per_s": round(n_output / engine.clock.now, 1),
        "prompt_tokens": n_prompt,
        "cached_tokens": sum(use.n_cached for use in uses),
        "loaded_tokens": sum(use.n_loaded for use in uses),
        "fetched_tokens": sum(use.n_fetched for use in uses),
        "pages_loaded": host.pages_loaded_total,
        "pages_loaded_ahead": host.pages_loaded_ahead_total,
        "pages_loaded_ahead_used": host.pages_loaded_ahead_used_by_waiting_total,
        "preemptions": engine.scheduler.n_preemptions,
        "steps": engine.n_steps,
    }


def measure_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures turns of the tiers while requests wait whose prompts share a half, which is on the device."""
    rng, engine = Random(3), Engine(arguments)
    half = _tokens(rng, arguments.turn_tokens)

    def add(prompt: bytearray, n_output: int) -> None:
        engine.scheduler.add(Request(str(rng.random()), Namespace(), prompt, len(prompt) // 4, n_output))

    for _ in range(arguments.rows - 1):
        add(_tokens(rng, 32), 1 << 20)
    add(bytearray(half), 1 << 20)
    for _ in range(8):
        engine.turn()
    for _ in range(arguments.queue):
        add(half + _tokens(rng, arguments.turn_tokens), 4)
    for _ in range(4):
        engine.turn()
    seconds = []
    for _ in range(2000):
        started = time.thread_time()
        engine.scheduler.tiers.advance()
        seconds.append(time.thread_time() - started)
    seconds.sort()
    return {
        "turn_mean_us": round(sum(seconds) / len(seconds) * 1e6, 1),
        "turn_p50_us": round(seconds[len(seconds) // 2] * 1e6, 1),
        "turn_max_us": round(seconds[-1] * 1e6, 1),
    }


def _tokens(rng: Random, n: int) -> bytearray:
    return bytearray(pack_tokens(array("i", [rng.randrange(10, VOCAB) for _ in range(_around(rng, n))])))


def _around(rng: Random, n: int) -> int:
    """Returns a random length from half of ``n`` to one and a half."""
    return rng.randint(n // 2, n * 3 // 2)


if __name__ == "__main__":
    main()
