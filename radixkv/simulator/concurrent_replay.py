"""A replay with several requests in flight, which the production scheduler ranks, admits and retracts."""

from __future__ import annotations

from collections import deque
from heapq import nlargest

from radixkv.config import SchedulerConfig
from radixkv.errors import ConfigError
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.simulator.replay import Replayed
from radixkv.simulator.traffic import Traffic
from radixkv.tree.node import TOKEN_BYTES, Namespace

_LOOKAHEAD = 1
"""Steps that are launched before the oldest one's result is taken, as the server's loop has it."""


MAX_NUM_BATCHED_TOKENS = 8192
"""Most tokens a step, as by default on CUDA."""


def check_crowd(traffic: Traffic, max_num_batched_tokens: int) -> None:
    """Raises ``ConfigError`` for another rule than ``engine``, or a step that is not of whole pages."""
    if traffic.rule != "engine":
        raise ConfigError("several requests in flight share the engine's pool; use --rule engine")
    n_pages, n_more = divmod(max_num_batched_tokens, traffic.page_size)
    if n_pages < 1 or n_more:
        raise ConfigError(
            f"max_num_batched_tokens {max_num_batched_tokens} is not one or more pages of {traffic.page_size}"
        )


class Crowd:
    """A pool, the scheduler over it, and clients that each send the next request when their last one has ended.

    Args:
        traffic: the prompts, by the rule ``engine``; a symbol is a token.
        capacity_pages: of the pool; None has room for all.
        concurrency: clients.
        max_num_batched_tokens: most tokens a step.

    Raises:
        ConfigError: as ``check_crowd``.
    """

    def __init__(
        self, traffic: Traffic, capacity_pages: int | None, concurrency: int, max_num_batched_tokens: int
    ) -> None:
        check_crowd(traffic, max_num_batched_tokens)
        concurrency = min(concurrency, len(traffic.n_tokens))  # there are never more
        in_flight = nlargest(concurrency, (-(-n_tokens // traffic.page_size) + 1 for n_tokens in traffic.n_tokens))
        n_pages = traffic.n_distinct_pages + sum(in_flight)  # nothing is evicted of so many
        if capacity_pages is not None:
            n_pages = min(n_pages, capacity_pages)
        self._traffic = traffic
        self._concurrency = concurrency
        self.cache = PageCache(n_pages, traffic.symbols_a_page)
        self._scheduler = Scheduler(
            self.cache,
            SchedulerConfig(
                max_num_seqs=concurrency,
                max_num_batched_tokens=max_num_batched_tokens // traffic.page_size * traffic.symbols_a_page,
                max_queued_requests=concurrency,
            ),
        )
        self._namespace = Namespace()
        self._launched: deque[StepPlan] = deque()
        self._live: dict[Request, int] = {}
        """Which prompt each request has."""

    def run(self) -> Replayed:
        """Replays all prompts, and empties the pool. Some 0.2 ms a prompt and step, and O(pages)."""
        traffic = self._traffic
        cached = [0] * len(traffic.n_tokens)
        n_too_large = most = 0
        waiting = iter(range(len(cached)))
        is_all_sent = False
        while self._live or not is_all_sent:
            while len(self._live) < self._concurrency and not is_all_sent:
                index = next(waiting, None)
                if index is None:
                    is_all_sent = True
                elif traffic.n_tokens[index] > self.cache.n_pages * traffic.page_size:
                    n_too_large += 1
                else:
                    self._send(index)
            for request in self._turn():
                assert request.n_cached is not None, "its first token is out"
                index = self._live.pop(request)
                cached[index] = traffic.n_cached_tokens(index, request.n_cached)
            most = max(most, self.cache.tree.n_pages_reachable)
        self.cache.flush()
        return Replayed(cached, n_too_large, self.cache.n_evicted, most)

    def _send(self, index: int) -> None:
        symbols = self._traffic.symbols(index)
        request = Request(
            id="",
            namespace=self._namespace,
            tokens=bytearray(symbols),
            n_prompt=len(symbols) // TOKEN_BYTES,
            max_tokens=1,
        )
        self._live[request] = index
        self._scheduler.add(request)

    def _turn(self) -> list[Request]:
        """Launches a step, and takes the result of the one before; returns the requests that have ended."""
        plan = self._scheduler.schedule()
        if plan is not None:
            self._launched.append(plan)
        if len(self._launched) <= _LOOKAHEAD and (plan is not None or not self._launched):
            return []
        oldest = self._launched.popleft()
        n_rows = len(oldest.rows)
        updates = self._scheduler.complete(oldest, StepResult((0,) * n_rows, (True,) * n_rows))
        return [update.request for update in updates if update.finish_reason is not None]
