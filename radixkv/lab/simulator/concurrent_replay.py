"""A replay with several requests in flight on the production scheduler, of one server or of its replicas."""

from __future__ import annotations

import asyncio
import math
from heapq import nlargest

from radixkv.errors import ConfigError
from radixkv.frontend.replicas.placement import Place, Placement
from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.caches import CacheSettings, ReplayResult, ServerTokens
from radixkv.lab.simulator.stepped_engine import SteppedEngine
from radixkv.lab.simulator.traffic import Traffic
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.settings.config import SchedulerConfig
from radixkv.terminal import Progress
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

MAX_NUM_BATCHED_TOKENS = 8192
"""Maximum tokens per step: the default on CUDA."""
STEP_S = 0.02
"""How long a step takes, for which the placement among replicas remembers prompts by time."""


def check_concurrent_replay(traffic: Traffic, max_num_batched_tokens: int) -> None:
    """Raises ``ConfigError`` if the rule is not ``engine`` or the step size is not a multiple of the page size."""
    if traffic.rule != "engine":
        raise ConfigError("requests in flight take pages of the engine's pool; use --rule engine")
    n_pages, remainder = divmod(max_num_batched_tokens, traffic.page_size)
    if n_pages < 1 or remainder:
        raise ConfigError(
            f"max_num_batched_tokens {max_num_batched_tokens} is not one or more pages of {traffic.page_size}"
        )


def enough_pages(traffic: Traffic, answers: Answers | None, n_in_flight: int) -> int:
    """Returns the pages of a pool in which nothing is evicted. O(requests · log n_in_flight)."""
    n_answer = [1] * len(traffic.n_tokens) if answers is None else answers.lengths
    pages_in_flight = nlargest(
        n_in_flight, (-(-sum(n) // traffic.page_size) + 1 for n in zip(traffic.n_tokens, n_answer, strict=True))
    )
    n_pages = traffic.n_distinct_pages + sum(pages_in_flight)
    if answers is not None:
        n_pages += sum(n // traffic.page_size + 1 for n in n_answer)
    return n_pages


def scheduler_limits(
    traffic: Traffic,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    max_queued_requests: int,
    target_itl_ms: float | None = None,
) -> SchedulerLimits:
    """Returns the limits of a scheduler for which a symbol is a token. O(1)."""
    n_reserved_pages = -(-SchedulerConfig.num_reserved_decode_tokens // traffic.page_size)
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens // traffic.page_size * traffic.symbols_per_page,
        max_queued_requests=max_queued_requests,
        num_reserved_decode_tokens=n_reserved_pages * traffic.symbols_per_page,
        target_itl_ms=target_itl_ms,
    )


class ConcurrentReplay:
    """Page pools and their schedulers, with clients that each send a new request as soon as their last one ends.

    Several pools are those of replicas: each prompt goes to the one that the server's own ``Placement`` chooses,
    and all take their steps at the same time.

    Args:
        traffic: the prompts, under the rule ``engine``; each symbol is one token.
        settings: of the caches of each replica; not with the policy ``oracle``, because the order of requests is
            not known beforehand.
        concurrency: number of clients.
        max_num_batched_tokens: maximum tokens per step.
        answers: the prompts' answers, which take steps and pages, and stay cached, as in the server. An answer ends
            early where the pool has no room for the rest. None: each request ends with its first token.
        n_replicas: at least 1.

    Raises:
        ConfigError: see ``check_concurrent_replay``; or there is a disk tier without a host tier.
    """

    def __init__(
        self,
        traffic: Traffic,
        settings: CacheSettings,
        concurrency: int,
        max_num_batched_tokens: int,
        answers: Answers | None = None,
        n_replicas: int = 1,
    ) -> None:
        check_concurrent_replay(traffic, max_num_batched_tokens)
        concurrency = min(concurrency, len(traffic.n_tokens))  # more clients than requests stay idle
        n_pages = enough_pages(traffic, answers, concurrency)
        limits = scheduler_limits(traffic, concurrency, max_num_batched_tokens, max_queued_requests=concurrency)
        self._traffic = traffic
        self._concurrency = concurrency
        self._replicas = {
            number: SteppedEngine(traffic, settings.limited(n_pages), limits, answers)
            for number in range(n_replicas)
        }
        self.cache = self._replicas[0].cache
        """That of the first replica."""
        self._n_steps = 0
        # Replicas answer at once here.
        self._placement = Placement(probe_limit_s=math.inf, clock=lambda: self._n_steps * STEP_S)
        self.by_server = [ServerTokens()] * n_replicas
        """Prompt tokens that each replica has served."""

    def run(self, progress: Progress | None = None) -> ReplayResult:
        """Replays all prompts and flushes the pools. About 0.2 ms per prompt and step, plus O(pages).

        It runs an event loop of its own, so it must not be called within another one.

        Args:
            progress: shows how many prompts are sent.
        """
        with asyncio.Runner() as runner:
            return runner.run(self._run(progress))

    async def _run(self, progress: Progress | None) -> ReplayResult:
        n_tokens, engines = self._traffic.n_tokens, self._replicas.values()
        cached = [0] * len(n_tokens)
        cache_use = CacheUse()
        n_too_large = max_cached_pages = n_in_flight = 0
        unsent = iter(range(len(cached)))
        all_sent = False
        while n_in_flight or not all_sent:
            while n_in_flight < self._concurrency and not all_sent:
                index = next(unsent, None)
                if progress is not None and index is not None:
                    progress.show(f"{index}/{len(cached)} requests sent")
                if index is None:
                    all_sent = True
                elif n_tokens[index] > self.cache.n_pages * self._traffic.page_size:
                    n_too_large += 1
                else:
                    number, load = await self._choose(index)
                    self._replicas[number].send(index, load)
                    n_in_flight += 1
            for number, engine in self._replicas.items():
                for index, use in engine.step().ended:
                    n_in_flight -= 1
                    cached[index] = use.n_cached
                    cache_use += use
                    self.by_server[number] = self.by_server[number].plus(n_tokens[index], use.n_cached)
            self._n_steps += 1
            max_cached_pages = max(max_cached_pages, sum(one.cache.tree.n_pages_reachable for one in engines))
        for engine in engines:
            engine.flush()
        n_evicted = sum(engine.cache.n_evicted for engine in engines)
        return ReplayResult(cached, cache_use, n_too_large, n_evicted, max_cached_pages)

    async def _choose(self, index: int) -> Place:
        """Returns which replica gets a prompt."""
        if len(self._replicas) == 1:
            return Place(0, 1.0)
        prompt = Submit("", self._traffic.symbols(index), SamplingParams())
        found = await self._placement.probe(self._replicas, [prompt])
        return self._placement.choose(
            prompt, self._replicas, {number: lengths[0] for number, lengths in found.items()}
        )
