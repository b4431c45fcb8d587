"""A replay on several servers, each with a cache of its own, behind a router."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.lab.simulator.caches import ReplayResult, ServerTokens
from radixkv.lab.simulator.replay import Replay
from radixkv.lab.simulator.routers import Routing, open_router
from radixkv.lab.simulator.traffic import Traffic
from radixkv.runtime.events.log import EventLog
from radixkv.terminal import Progress
from radixkv.tree.digest import chained_xxh3_64, namespace_digest
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_use import CacheUse


class RoutedReplay:
    """Servers with a request in flight each, and the router that gives each request to one of them.

    Args:
        traffic: the prompts.
        servers: a new replay of the traffic for each; not with the policy ``oracle``, because it is not known
            beforehand which prompts a server gets.
        routing: what the router knows.
        events_delay: see ``open_router``.
    """

    def __init__(
        self, traffic: Traffic, servers: Sequence[Replay], routing: Routing, *, events_delay: int = 0
    ) -> None:
        self._traffic = traffic
        self._servers = servers
        self._router = open_router(routing, len(servers), traffic.page_size, events_delay)
        self._logs: list[EventLog] = []
        if routing == "events":
            self._logs = [server.open_event_log() for server in servers]
        self._root_hash = namespace_digest(Namespace())
        self.by_server = [ServerTokens()] * len(servers)
        """Prompt tokens that each server has served."""

    def run(self, progress: Progress | None = None) -> ReplayResult:
        """Replays all prompts in order and flushes the caches. About 0.1 ms per prompt, plus O(pages + servers).

        Args:
            progress: shows how many prompts are replayed.
        """
        cached: list[int] = []
        n_too_large = n_cached_pages = max_cached_pages = 0
        n_prompts = len(self._traffic.n_tokens)
        for index in range(n_prompts):
            if progress is not None:
                progress.show(f"{index}/{n_prompts} requests")
            chosen = self._router.choose(self._traffic.n_tokens[index], self._page_hashes(index))
            server = self._servers[chosen]
            n_cached_pages -= server.cache.tree.n_pages_reachable
            n_cached_tokens = server.replay(index)
            n_cached_pages += server.cache.tree.n_pages_reachable
            if self._logs:
                self._router.receive(chosen, self._logs[chosen].take())
            cached.append(n_cached_tokens or 0)
            if n_cached_tokens is None:
                n_too_large += 1
            else:
                n_tokens = self._traffic.n_tokens[index]
                self.by_server[chosen] = self.by_server[chosen].plus(n_tokens, n_cached_tokens)
            max_cached_pages = max(max_cached_pages, n_cached_pages)
        for server in self._servers:
            server.flush()
        return ReplayResult(
            cached,
            sum((server.cache_use for server in self._servers), CacheUse()),
            n_too_large,
            sum(server.cache.n_evicted for server in self._servers),
            max_cached_pages,
        )

    def _page_hashes(self, index: int) -> list[int]:
        """Returns the hash of each whole page of a prompt, as in the events. O(pages)."""
        symbols, page_bytes = self._traffic.symbols(index), self._traffic.symbols_per_page * TOKEN_BYTES
        hashes: list[int] = []
        value = self._root_hash
        for start in range(0, len(symbols) - page_bytes + 1, page_bytes):
            value = chained_xxh3_64(value, symbols[start : start + page_bytes])
            hashes.append(value)
        return hashes
