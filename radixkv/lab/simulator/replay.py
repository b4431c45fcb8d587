"""A replay of one prompt at a time through the production scheduler, page pool and radix tree."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from radixkv.lab.simulator.caches import CacheSettings, ReplayCaches, ReplayResult
from radixkv.lab.simulator.next_use import NextUse, OracleEviction, next_uses
from radixkv.lab.simulator.traffic import Traffic
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.events.log import EventLog
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.result import StepResult
from radixkv.terminal import Progress
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_use import CacheUse

_ANSWER = StepResult(tokens=(0,), finite=(True,))
"""The result of every step: one token for its one row."""
_MAX_TURNS = 3
"""Turns until a request is admitted: one fetches its pages from disk, one loads them. The copies take no time."""
_SEED = 0
"""Seed of the draw of the requests whose end is known: the same in all replays."""


class Replay:
    """Page caches and their scheduler, with one request in flight.

    Args:
        traffic: the prompts.
        settings: of the caches.
        ends_known: fraction of the prompts after which the caches learn which of their pages no later prompt uses,
            and demote these.

    Raises:
        ConfigError: a disk tier without a host tier.
    """

    def __init__(self, traffic: Traffic, settings: CacheSettings, *, ends_known: float = 0.0) -> None:
        self._traffic = traffic
        largest = max(map(self._pages_for, traffic.n_tokens))
        self._n_extra_pages = largest if traffic.rule == "blocks" else 0
        enough = traffic.n_distinct_pages + largest  # nothing is evicted
        self._caches = ReplayCaches(traffic, settings.limited(enough, self._n_extra_pages))
        self.cache = self._caches.device
        self._oracles = [policy for policy in self._caches.policies if isinstance(policy, OracleEviction)]
        random = Random(_SEED)
        self._is_end_known = [random.random() < ends_known for _ in traffic.n_tokens]
        knows_future = bool(self._oracles) or ends_known > 0
        self._next_uses = next_uses(traffic, self.cache.n_pages) if knows_future else None
        limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=largest * traffic.symbols_per_page)
        self._scheduler = open_scheduler(self.cache, limits, host_tier=self._caches.host_tier)
        self._namespace = Namespace()
        self.cache_use = CacheUse()
        """Tokens that the prompts so far got from the tiers."""

    def run(self, progress: Progress | None = None) -> ReplayResult:
        """Replays all prompts and flushes the caches. About 0.1 ms per prompt, plus O(pages).

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
        self.flush()
        return ReplayResult(cached, self.cache_use, n_too_large, self.cache.n_evicted, max_cached_pages)

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
            known_key=bytearray(symbols),
            n_prompt=len(symbols) // TOKEN_BYTES,
            max_tokens=1,
        )
        self._scheduler.add(request)
        plan = None
        for _ in range(_MAX_TURNS):
            plan = plan or self._scheduler.schedule()
        assert plan is not None, "a lone request that fits the pool is admitted"
        spans = () if self._next_uses is None else self._next_uses[index]
        if spans:
            self._set_next_use(spans[-1].prompt)
        self._scheduler.complete(plan, _ANSWER)
        self._caches.finish_stores()
        if self._oracles:
            self._rank(symbols, spans)
        if self._is_end_known[index]:
            self._demote(symbols, spans)
        if self._n_extra_pages:
            self._evict_to_capacity()
        use = self._caches.cache_use(index, request)
        self.cache_use += use
        return use.n_cached

    def flush(self) -> None:
        """Empties the caches, which frees their memory. O(pages)."""
        self._caches.flush()

    def open_event_log(self) -> EventLog:
        """Returns the log of what the tiers get and lose from now on, which is before the first prompt."""
        log = EventLog(self.cache, self._scheduler.tiers.changes(), shows_salted_tokens=False)
        log.take()  # a page store records what it removes from the first call on
        return log

    def _set_next_use(self, prompt: int) -> None:
        for oracle in self._oracles:
            oracle.next_use = prompt

    def _rank(self, symbols: bytes, spans: Sequence[NextUse]) -> None:
        """Ranks all spans but the last for the oracle, from the latest next use to the earliest.

        The last span got its rank when the request finished.
        """
        page_bytes = self._traffic.symbols_per_page * TOKEN_BYTES
        for span in reversed(spans[:-1]):
            self._set_next_use(span.prompt)
            for tier in self._caches.tiers:
                tier.tree.release(tier.tree.lease(self._namespace, symbols[: span.n_pages * page_bytes]))

    def _demote(self, symbols: bytes, spans: Sequence[NextUse]) -> None:
        """Demotes the pages that no later prompt uses."""
        if not spans or spans[-1].prompt < len(self._traffic.n_tokens):
            return
        n_kept = spans[-2].n_pages * self._traffic.symbols_per_page
        for tier in self._caches.tiers:
            tier.tree.demotions.add(self._namespace, symbols, n_kept)

    def _evict_to_capacity(self) -> None:
        """Evicts down to the capacity by reserving, for a moment, the extra pages beside it."""
        extra = BlockTable(None, [], 0)
        self.cache.reserve(extra, self._n_extra_pages)
        self.cache.close(extra)

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._traffic.page_size)
