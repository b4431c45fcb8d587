"""A replay of one prompt at a time through the production scheduler, page pool and radix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.result import StepResult
from radixkv.simulator.next_use import NextUse, OracleEviction, next_uses
from radixkv.simulator.traffic import Traffic
from radixkv.terminal_progress import Progress
from radixkv.tree.node import TOKEN_BYTES, Namespace

Policy = Literal["lru", "oracle"]
"""Which pages are evicted first: the least recently used (``lru``), or those used again last (``oracle``)."""

_ANSWER = StepResult(tokens=(0,), finite=(True,))
"""The result of every step: one token for its one row."""


@dataclass(frozen=True)
class ReplayResult:
    """The counts of one replay with one capacity and one policy."""

    n_cached_tokens: list[int]
    """Cached tokens of each prompt."""
    n_too_large: int
    """Prompts larger than the pool: they are refused and count as 0 cached tokens."""
    n_evicted_pages: int
    """Pages evicted during the replay."""
    max_cached_pages: int
    """Maximum number of cached pages, sampled after each prompt or step."""


class Replay:
    """A page pool and its scheduler, with one request in flight.

    Args:
        traffic: the prompts.
        capacity_pages: pages of the cache; None makes it large enough that nothing is evicted.
        policy: the eviction policy.
    """

    def __init__(self, traffic: Traffic, capacity_pages: int | None, policy: Policy) -> None:
        self._traffic = traffic
        largest = max(map(self._pages_for, traffic.n_tokens))
        self._n_extra_pages = largest if traffic.rule == "blocks" else 0
        n_pages = traffic.n_distinct_pages + largest  # enough that nothing is evicted
        if capacity_pages is not None:
            n_pages = min(n_pages, capacity_pages + self._n_extra_pages)
        self._next_uses = next_uses(traffic, n_pages) if policy == "oracle" else None
        self._oracle = OracleEviction(len(traffic.n_tokens))
        self.cache = PageCache(
            n_pages, traffic.symbols_per_page, policy=None if self._next_uses is None else self._oracle
        )
        self._scheduler = Scheduler(
            self.cache, max_num_seqs=1, max_num_batched_tokens=largest * traffic.symbols_per_page
        )
        self._namespace = Namespace()

    def run(self, progress: Progress | None = None) -> ReplayResult:
        """Replays all prompts and flushes the pool. About 0.1 ms per prompt, plus O(pages).

        Args:
            progress: shows how many prompts are replayed.
        """
        cached: list[int] = []
        n_too_large = max_cached_pages = 0
        n_prompts = len(self._traffic.n_tokens)
        for index in range(n_prompts):
            if progress is not None:
                progress.show(f"{index}/{n_prompts} requests")
            n_cached_tokens = self.replay(index)
            cached.append(n_cached_tokens or 0)
            n_too_large += n_cached_tokens is None
            max_cached_pages = max(max_cached_pages, self.cache.tree.n_pages_reachable)
        self.cache.flush()
        return ReplayResult(cached, n_too_large, self.cache.n_evicted, max_cached_pages)

    def replay(self, index: int) -> int | None:
        """Replays one prompt, which generates one token. Prompts must be replayed in order. O(pages).

        Returns:
            The number of cached tokens, or None if the prompt is larger than the pool.
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
        plan = self._scheduler.schedule()
        assert plan is not None, "a lone request that fits the pool is admitted"
        spans = () if self._next_uses is None else self._next_uses[index]
        if spans:
            self._oracle.next_use = spans[-1].prompt
        self._scheduler.complete(plan, _ANSWER)
        self._rank(symbols, spans)
        if self._n_extra_pages:
            self._evict_to_capacity()
        assert request.n_cached is not None, "a finished request was scheduled"
        return traffic.n_cached_tokens(index, request.n_cached)

    def _rank(self, symbols: bytes, spans: Sequence[NextUse]) -> None:
        """Ranks all spans but the last, the one that is used again last first.

        The last span got its rank when the request finished.
        """
        page_bytes = self._traffic.symbols_per_page * TOKEN_BYTES
        for span in reversed(spans[:-1]):
            self._oracle.next_use = span.prompt
            self.cache.tree.release(self.cache.tree.lease(self._namespace, symbols[: span.n_pages * page_bytes]))

    def _evict_to_capacity(self) -> None:
        """Evicts down to the capacity by reserving, for a moment, the extra pages beside it."""
        extra = BlockTable(None, [], 0)
        self.cache.reserve(extra, self._n_extra_pages)
        self.cache.close(extra)

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._traffic.page_size)
