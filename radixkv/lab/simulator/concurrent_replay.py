"""A replay with several requests in flight on the production scheduler."""

from __future__ import annotations

from array import array
from collections import deque
from heapq import nlargest

from radixkv.errors import ConfigError
from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.caches import CacheSettings, ReplayCaches, ReplayResult
from radixkv.lab.simulator.traffic import Traffic
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.settings.config import SchedulerConfig
from radixkv.terminal import Progress
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_use import CacheUse

_LOOKAHEAD = 1
"""Steps launched before the result of the oldest one is taken, as in the server's loop."""


MAX_NUM_BATCHED_TOKENS = 8192
"""Maximum tokens per step: the default on CUDA."""


def check_concurrent_replay(traffic: Traffic, max_num_batched_tokens: int) -> None:
    """Raises ``ConfigError`` if the rule is not ``engine`` or the step size is not a multiple of the page size."""
    if traffic.rule != "engine":
        raise ConfigError("several requests in flight share the engine's pool; use --rule engine")
    n_pages, remainder = divmod(max_num_batched_tokens, traffic.page_size)
    if n_pages < 1 or remainder:
        raise ConfigError(
            f"max_num_batched_tokens {max_num_batched_tokens} is not one or more pages of {traffic.page_size}"
        )


class ConcurrentReplay:
    """A page pool and its scheduler, with clients that each send a new request as soon as their last one ends.

    Args:
        traffic: the prompts, under the rule ``engine``; each symbol is one token.
        settings: of the caches; not with the policy ``oracle``, because the order of requests is not known
            beforehand.
        concurrency: number of clients.
        max_num_batched_tokens: maximum tokens per step.
        answers: the prompts' answers, which take steps and pages, and stay cached, as in the server. An answer ends
            early where the pool has no room for the rest. None: each request ends with its first token.

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
    ) -> None:
        check_concurrent_replay(traffic, max_num_batched_tokens)
        concurrency = min(concurrency, len(traffic.n_tokens))  # more clients than requests stay idle
        n_answer = [1] * len(traffic.n_tokens) if answers is None else answers.lengths
        pages_in_flight = nlargest(
            concurrency, (-(-sum(n) // traffic.page_size) + 1 for n in zip(traffic.n_tokens, n_answer, strict=True))
        )
        n_pages = traffic.n_distinct_pages + sum(pages_in_flight)  # enough that nothing is evicted
        if answers is not None:
            n_pages += sum(n // traffic.page_size + 1 for n in n_answer)
        self._traffic = traffic
        self._concurrency = concurrency
        self._caches = ReplayCaches(traffic, settings.limited(n_pages))
        self.cache = self._caches.device
        n_reserved_pages = -(-SchedulerConfig.num_reserved_decode_tokens // traffic.page_size)
        limits = SchedulerLimits(
            max_num_seqs=concurrency,
            max_num_batched_tokens=max_num_batched_tokens // traffic.page_size * traffic.symbols_per_page,
            max_queued_requests=concurrency,
            num_reserved_decode_tokens=n_reserved_pages * traffic.symbols_per_page,
        )
        self._scheduler = open_scheduler(self.cache, limits, host_tier=self._caches.host_tier)
        self._namespace = Namespace()
        self._launched: deque[StepPlan] = deque()
        self._answers = answers
        self._in_flight: dict[Request, int] = {}
        """Prompt index of each request in flight."""
        self._answer_of: dict[Request, array[int]] = {}
        """The answer of each request in flight."""

    def run(self, progress: Progress | None = None) -> ReplayResult:
        """Replays all prompts and flushes the pool. About 0.2 ms per prompt and step, plus O(pages).

        Args:
            progress: shows how many prompts are sent.
        """
        traffic = self._traffic
        cached = [0] * len(traffic.n_tokens)
        cache_use = CacheUse()
        n_too_large = max_cached_pages = 0
        unsent = iter(range(len(cached)))
        all_sent = False
        while self._in_flight or not all_sent:
            while len(self._in_flight) < self._concurrency and not all_sent:
                index = next(unsent, None)
                if progress is not None and index is not None:
                    progress.show(f"{index}/{len(cached)} requests sent")
                if index is None:
                    all_sent = True
                elif traffic.n_tokens[index] > self.cache.n_pages * traffic.page_size:
                    n_too_large += 1
                else:
                    self._send(index)
            for request in self._step():
                index = self._in_flight.pop(request)
                del self._answer_of[request]
                self._scheduler.tiers.ended((request,))
                use = self._caches.cache_use(index, request)
                cached[index] = use.n_cached
                cache_use += use
            max_cached_pages = max(max_cached_pages, self.cache.tree.n_pages_reachable)
        self._caches.flush()
        return ReplayResult(cached, cache_use, n_too_large, self.cache.n_evicted, max_cached_pages)

    def _send(self, index: int) -> None:
        symbols = self._traffic.symbols(index)
        n_prompt = len(symbols) // TOKEN_BYTES
        answer = array("i", bytes(TOKEN_BYTES) if self._answers is None else self._answers.symbols(index))
        n_room = self.cache.n_pages * self.cache.page_size - n_prompt
        request = Request(
            id="",
            namespace=self._namespace,
            tokens=bytearray(symbols),
            n_prompt=n_prompt,
            max_tokens=max(1, min(len(answer), n_room)),
        )
        self._in_flight[request] = index
        self._answer_of[request] = answer
        self._scheduler.add(request)

    def _next_token(self, row: Row, request: Request) -> int:
        """Returns the token that a row samples; -1 if it samples none, or after the end of its answer."""
        answer = self._answer_of.get(request)
        place = len(request.tokens) // TOKEN_BYTES - request.n_prompt
        return -1 if row.sampling is None or answer is None or place >= len(answer) else answer[place]

    def _step(self) -> list[Request]:
        """Launches a step and completes the one before; returns the requests that finished."""
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(plan)
        if len(self._launched) <= _LOOKAHEAD and (plan is not None or not self._launched):
            return []
        oldest = self._launched.popleft()
        requests = self._scheduler.launched_plans[0].requests
        tokens = [self._next_token(row, request) for row, request in zip(oldest.rows, requests, strict=True)]
        updates = self._scheduler.complete(oldest, StepResult(tuple(tokens), (True,) * len(tokens)))
        return [update.request for update in updates if update.finish_reason is not None]
