"""The production page caches of a replay: the device's, and a host tier whose copies take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from radixkv.config import CacheConfig
from radixkv.errors import InvariantError
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.load_cost import LoadCost
from radixkv.runtime.cache.transfers import Transfers
from radixkv.runtime.request import Request
from radixkv.runtime.step.page_copier import FinishedCopy
from radixkv.simulator.next_use import OracleEviction
from radixkv.simulator.traffic import Traffic
from radixkv.tree.eviction import EvictionPolicy, open_eviction_policy

Policy = Literal["lru", "lfuda", "adaptive", "oracle"]
"""Which pages are evicted first: the server's policies, and those used again last (``oracle``)."""

GHOST_CAPACITY = CacheConfig().ghost_capacity
"""The server's default."""


class Capacity(NamedTuple):
    """Capacities of the tiers, in tokens."""

    device: int
    host: int | None = None
    """None: no host tier."""


class CostModel(NamedTuple):
    """Time of a token in microseconds. The defaults are those of Llama 3 8B in bfloat16 on an H200."""

    load_us_per_token: float = 2.4
    """To copy its KV from the host to the device."""
    compute_us_per_token: float = 21.7
    """To compute it as part of a prompt."""

    def saved_seconds(self, n_cached: int, n_loaded: int) -> float:
        """Returns the time saved by ``n_cached`` cached tokens, of which ``n_loaded`` were loaded from the host."""
        return (n_cached * self.compute_us_per_token - n_loaded * self.load_us_per_token) / 1e6


COSTS = CostModel()
"""The default of replays."""


@dataclass(frozen=True)
class ReplayResult:
    """The counts of one replay with one capacity and one policy."""

    n_cached_tokens: list[int]
    """Cached tokens of each prompt, in any tier."""
    n_loaded_tokens: int
    """Those that were loaded from the host tier, of all prompts."""
    n_too_large: int
    """Prompts larger than the pool: they are refused and count as 0 cached tokens."""
    n_evicted_pages: int
    """Pages evicted from the device during the replay."""
    max_cached_pages: int
    """Maximum number of cached pages of the device, sampled after each prompt or step."""


class ReplayCaches:
    """The device's page cache and the host tier, between which the production transfers copy.

    Args:
        traffic: the prompts.
        n_pages: pages of the device.
        n_host_pages: pages of the host tier; None: no host tier.
        policy: the eviction policy of both tiers.
        ghost_capacity: evicted pages that ``adaptive`` remembers, as a multiple of the pages cached.
        costs: decide between loading and computing.
    """

    def __init__(
        self,
        traffic: Traffic,
        n_pages: int,
        n_host_pages: int | None,
        policy: Policy,
        ghost_capacity: float,
        costs: CostModel,
    ) -> None:
        n_tiers = 1 if n_host_pages is None else 2
        self.policies = [_open_policy(traffic, policy, ghost_capacity) for _ in range(n_tiers)]
        """The policy object of each tier."""
        self.device = PageCache(n_pages, traffic.symbols_per_page, policy=self.policies[0])
        self.transfers: Transfers | None = None
        self.tiers = [self.device]
        self._traffic = traffic
        if n_host_pages is not None:
            host = PageCache(n_host_pages, traffic.symbols_per_page, policy=self.policies[1])
            page_seconds = traffic.page_size * costs.load_us_per_token / 1e6
            cost = _load_cost(traffic, costs)
            self.transfers = Transfers(self.device, host, _InstantCopier(page_seconds), cost=cost)
            self.tiers.append(host)

    def finish_stores(self) -> None:
        """Copies all offered pages to the host tier. No request may be in flight. O(pages)."""
        if self.transfers is not None:
            while self.transfers.n_offers or self.transfers.is_busy:
                self.transfers.advance()

    def flush(self) -> None:
        """Finishes all stores and empties the tiers, which frees their memory. No request may be in flight."""
        self.finish_stores()
        for tier in self.tiers:
            tier.flush()

    def cached_tokens(self, index: int, request: Request) -> tuple[int, int]:
        """Returns the cached tokens of prompt ``index``, whose request has finished, and those that were loaded."""
        assert request.n_cached is not None, "a finished request was scheduled"
        n_cached = self._traffic.n_cached_tokens(index, request.n_cached)
        n_on_device = max(0, request.n_cached - request.n_loaded)
        return n_cached, n_cached - self._traffic.n_cached_tokens(index, n_on_device)


class _InstantCopier:
    """A ``PageCopier`` whose copies are finished at once. Nothing is copied: a replay has no KV."""

    n_slots = 0
    page_bytes = 1

    def __init__(self, page_seconds: float) -> None:
        self._page_seconds = page_seconds
        self._tickets = count()
        self._finished: list[FinishedCopy] = []

    def take_new_slots(self) -> range:
        """Returns none: the host tier has all its slots from the start."""
        return range(0)

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> int:
        """Finishes a copy of the pages, with the time that it would take."""
        ticket = next(self._tickets)
        self._finished.append(FinishedCopy(ticket, len(pages) * self._page_seconds, None))
        return ticket

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> int:
        """Finishes a copy of the pages, with the time that a load of them would take."""
        return self.load(slots, pages)

    def take_finished(self) -> list[FinishedCopy]:
        """Returns the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        """Raises ``InvariantError``: there is nothing to wait for."""
        raise InvariantError("a replay waits for a copy, and copies take no time")

    def close(self) -> None:
        """Does nothing."""


def _open_policy(traffic: Traffic, name: Policy, ghost_capacity: float) -> EvictionPolicy:
    if name == "oracle":
        return OracleEviction(len(traffic.n_tokens))
    return open_eviction_policy(name, ghost_capacity)


def _load_cost(traffic: Traffic, costs: CostModel) -> LoadCost:
    """Returns an estimate that knows the costs already. The caches count symbols for tokens."""
    cost, n_pages = LoadCost(), 1000
    n_symbols, n_tokens = n_pages * traffic.symbols_per_page, n_pages * traffic.page_size
    cost.add_load(n_symbols, n_tokens * costs.load_us_per_token / 1e6)
    cost.add_step(n_symbols, n_symbols, n_tokens * costs.compute_us_per_token / 1e6)
    return cost
