"""A replay: prompts one after another through the production scheduler, pool and tree, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from radixkv.config import SchedulerConfig
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.result import StepResult
from radixkv.simulator.next_use import NextUse, next_uses
from radixkv.simulator.traffic import Traffic
from radixkv.tree.node import TOKEN_BYTES, Namespace

Policy = Literal["lru", "oracle"]
"""Who is evicted first: what was used least recently, or what will be used last or never again."""

_ANSWER = StepResult(tokens=(0,), finite=(True,))
"""One token, as every step of one row gives here."""


@dataclass(frozen=True)
class Replayed:
    """What a capacity and a policy gave."""

    n_cached_tokens: list[int]
    """Of each prompt."""
    n_too_large: int
    """Prompts that the pool could never hold: they are refused, and have no cached token."""
    n_evicted_pages: int
    most_cached_pages: int
    """After any of the prompts."""


class Replay:
    """A pool, and the scheduler over it.

    Args:
        traffic: the prompts.
        capacity_pages: of the cache; None has room for all.
        policy: who is evicted first.
    """

    def __init__(self, traffic: Traffic, capacity_pages: int | None, policy: Policy) -> None:
        self._traffic = traffic
        self._tick = 0
        largest = max(map(self._pages_for, traffic.n_tokens))
        self._n_aside = largest if traffic.rule == "blocks" else 0
        n_pages = traffic.n_distinct_pages + largest  # nothing is evicted of so many
        if capacity_pages is not None:
            n_pages = min(n_pages, capacity_pages + self._n_aside)
        self._future = next_uses(traffic, n_pages) if policy == "oracle" else None
        clock: Callable[[], int] | None = None if self._future is None else lambda: self._tick
        self.cache = PageCache(n_pages, traffic.symbols_a_page, clock=clock)
        self._scheduler = Scheduler(
            self.cache,
            SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=largest * traffic.symbols_a_page),
        )
        self._namespace = Namespace()

    def run(self) -> Replayed:
        """Replays all prompts, and empties the pool. Some 0.1 ms a prompt, and O(pages)."""
        cached: list[int] = []
        n_too_large = most = 0
        for index in range(len(self._traffic.n_tokens)):
            n_cached_tokens = self.replay(index)
            cached.append(n_cached_tokens or 0)
            n_too_large += n_cached_tokens is None
            most = max(most, self.cache.tree.n_pages_reachable)
        self.cache.flush()
        return Replayed(cached, n_too_large, self.cache.n_evicted, most)

    def replay(self, index: int) -> int | None:
        """One prompt, with one token as its answer; they are to come in order. O(pages).

        Returns:
            Tokens that were cached; None if the pool can never hold the prompt.
        """
        traffic = self._traffic
        if self._pages_for(traffic.n_tokens[index]) > self.cache.n_pages:
            return None
        symbols = traffic.symbols(index)
        request = Request(
            id="",
            namespace=self._namespace,
            tokens=bytearray(symbols),
            n_prompt=len(symbols) // TOKEN_BYTES,
            max_tokens=1,
        )
        self._scheduler.add(request)
        self._tick = -index
        plan = self._scheduler.schedule()
        assert plan is not None, "alone, a request that the pool holds is admitted"
        runs = () if self._future is None else self._future[index]
        if runs:
            self._tick = -runs[-1].prompt
        self._scheduler.complete(plan, _ANSWER)
        self._remember(symbols, runs)
        if self._n_aside:
            self._make_room()
        assert request.n_cached is not None, "its first token is out"
        return traffic.n_cached_tokens(index, request.n_cached)

    def _remember(self, symbols: bytes, runs: Sequence[NextUse]) -> None:
        """Ticks for all but the last run of a prompt, which got its own when the prompt ended; least first."""
        page_bytes = self._traffic.symbols_a_page * TOKEN_BYTES
        for run in reversed(runs[:-1]):
            self._tick = -run.prompt
            self.cache.tree.release(self.cache.tree.lease(self._namespace, symbols[: run.n_pages * page_bytes]))

    def _make_room(self) -> None:
        """Evicts down to the capacity: the pool has room beside it for the largest prompt."""
        aside = BlockTable(None, [], 0)
        self.cache.reserve(aside, self._n_aside)
        self.cache.close(aside)

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._traffic.page_size)
