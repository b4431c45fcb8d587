"""The production page caches of a replay: the device's, and the tiers behind it, whose copies take no time."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Literal, NamedTuple

from radixkv.errors import ConfigError
from radixkv.lab.simulator.instant_copies import InstantCopier, InstantStore
from radixkv.lab.simulator.next_use import OracleEviction
from radixkv.lab.simulator.traffic import Traffic
from radixkv.lab.simulator.virtual_time import TimedCopier, TimedStore, VirtualTime
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES
from radixkv.settings.config import CacheConfig
from radixkv.tree.eviction_policies import EvictionPolicy, open_eviction_policy
from radixkv.wire.cache_use import CacheUse

Policy = Literal["lru", "lfuda", "adaptive", "oracle"]
"""Eviction policies: the server's, and ``oracle``, which evicts the page whose next use is latest."""

GHOST_CAPACITY = CacheConfig().ghost_capacity
"""The server's default."""


class Capacity(NamedTuple):
    """Capacities of the tiers, in tokens."""

    device: int
    host: int | None = None
    """None: no host tier."""
    disk: int | None = None
    """None: no disk tier, which needs a host tier."""

    def times(self, factor: int) -> Capacity:
        """Returns the capacities of that many servers together."""
        return Capacity(
            factor * self.device,
            None if self.host is None else factor * self.host,
            None if self.disk is None else factor * self.disk,
        )


class CostModel(NamedTuple):
    """Time of a token in microseconds.

    The defaults are those of Llama 3 8B in bfloat16 on an H200, with a disk of 6 GB/s.
    """

    load_us_per_token: float = 2.4
    """Time to copy a token's KV from the host to the device."""
    compute_us_per_token: float = 21.7
    """Time to compute a token as part of a prompt."""
    fetch_us_per_token: float = 21.8
    """Time to copy a token's KV from disk to the host."""

    def saved_seconds(self, use: CacheUse) -> float:
        """Returns the time that the cached tokens have saved."""
        copied_us = use.n_loaded * self.load_us_per_token + use.n_fetched * self.fetch_us_per_token
        return (use.n_cached * self.compute_us_per_token - copied_us) / 1e6


COSTS = CostModel()
"""The default of replays."""


class CacheSettings(NamedTuple):
    """The size and the rules of a server's caches."""

    n_pages: int | None
    """Pages of the device; None makes it large enough that nothing is evicted."""
    policy: Policy = "lru"
    """Eviction policy of device and host tier. The disk tier has an order of its own."""
    host_pages: int | None = None
    """Pages of the host tier; None: no host tier."""
    disk_pages: int | None = None
    """Pages of the disk tier, which needs a host tier; None: no disk tier."""
    ghost_capacity: float = GHOST_CAPACITY
    """Evicted pages that ``adaptive`` remembers, as a multiple of the pages cached."""
    costs: CostModel = COSTS
    """Decide between loading and computing."""
    n_states: int | None = None
    """States of recurrent layers that the device can keep, where symbols are tokens; None: the model has none."""

    def limited(self, most_pages: int, n_extra_pages: int = 0) -> CacheSettings:
        """Returns the settings with at most ``most_pages``, and with pages beside the capacity.

        A device without a limit keeps a state after each page, if it keeps any.
        """
        if self.n_pages is None:
            return self._replace(n_pages=most_pages, n_states=None if self.n_states is None else most_pages)
        return self._replace(n_pages=min(most_pages, self.n_pages + n_extra_pages))


class ServerTokens(NamedTuple):
    """Prompt tokens of the requests that one of several servers has served."""

    n_prompt: int = 0
    n_cached: int = 0

    def plus(self, n_prompt: int, n_cached: int) -> ServerTokens:
        """Returns the tokens with those of another request."""
        return ServerTokens(self.n_prompt + n_prompt, self.n_cached + n_cached)


@dataclass(frozen=True)
class ReplayResult:
    """The counts of one replay with one capacity and one policy."""

    n_cached_tokens: list[int]
    """Cached tokens of each prompt, in any tier."""
    cache_use: CacheUse
    """Tokens that all prompts got from the tiers."""
    n_too_large: int
    """Prompts larger than the pool: they are refused and count as 0 cached tokens."""
    n_evicted_pages: int
    """Pages evicted from the device during the replay."""
    max_cached_pages: int
    """Maximum number of cached pages of the device, sampled after each prompt or step."""


class ReplayCaches:
    """The device's page cache, the host tier and the disk tier, between which the production tiers copy.

    Args:
        traffic: the prompts.
        settings: of the caches, with the pages of the device.
        time: the virtual time that copies take; None: they take none.

    Raises:
        ConfigError: a disk tier without a host tier.
    """

    def __init__(self, traffic: Traffic, settings: CacheSettings, time: VirtualTime | None = None) -> None:
        n_pages, policy, n_host_pages, n_disk_pages, ghost_capacity, costs, n_states = settings
        assert n_pages is not None
        if n_disk_pages is not None and n_host_pages is None:
            raise ConfigError("pages come back from disk through a host tier; give a host tier, or no disk tier")
        n_trees = 1 if n_host_pages is None else 2
        self.policies = [_open_policy(traffic, policy, ghost_capacity) for _ in range(n_trees)]
        """The policy object of the device and of the host tier."""
        self.device = PageCache(
            n_pages,
            traffic.symbols_per_page,
            policy=self.policies[0],
            min_copied_tokens=traffic.min_copied_symbols,
            n_states=n_states,
            clock=monotonic if time is None else time.clock,
        )
        self.host_tier: HostTier | None = None
        self.tiers = [self.device]
        """The page caches of device and host tier."""
        self._traffic = traffic
        self._time = time
        if n_host_pages is not None:
            host = PageCache(n_host_pages, traffic.symbols_per_page, policy=self.policies[1])
            load_s, fetch_s = (
                traffic.page_size * us / 1e6 for us in (costs.load_us_per_token, costs.fetch_us_per_token)
            )
            copier = InstantCopier(load_s) if time is None else TimedCopier(time.clock, time.page_bytes, load_s)
            cost, disk = _load_cost(traffic, costs), None
            if n_disk_pages is not None:
                store = (
                    InstantStore(n_disk_pages, fetch_s)
                    if time is None
                    else TimedStore(time.clock, n_disk_pages, time.page_bytes, fetch_s)
                )
                disk = StorageTier(host, [store], bytes(KEY_BYTES), copier.buffer, cost)
            self.host_tier = HostTier(self.device, host, copier, disk, LoadChoice(cost=cost))
            self.tiers.append(host)

    def finish_stores(self) -> None:
        """Copies all offered pages to the host tier, and on to disk. No request may be in flight. O(pages)."""
        if (host_tier := self.host_tier) is not None:
            while (
                host_tier.n_offers or host_tier.is_busy or (host_tier.disk is not None and host_tier.disk.n_offers)
            ):
                host_tier.advance()
                end = None if self._time is None else self._time.clock.next_end()
                if self._time is not None and end is not None:
                    self._time.clock.now = end

    def flush(self) -> None:
        """Finishes all stores and empties the tiers, which frees their memory. No request may be in flight."""
        self.finish_stores()
        for tier in self.tiers:
            tier.flush()

    def cache_use(self, index: int, request: Request) -> CacheUse:
        """Returns what the tiers gave prompt ``index``, whose request has finished."""
        use = request.cache_use.counted
        assert use is not None, "a finished request was scheduled"
        n_cached, n_on_device, n_in_memory = (
            self._traffic.n_cached_tokens(index, n_symbols)
            for n_symbols in (
                use.n_cached,
                use.n_cached - use.n_loaded,
                use.n_cached - use.n_fetched,
            )
        )
        return CacheUse(n_cached, n_loaded=n_cached - n_on_device, n_fetched=n_cached - n_in_memory)


def _open_policy(traffic: Traffic, name: Policy, ghost_capacity: float) -> EvictionPolicy:
    if name == "oracle":
        return OracleEviction(len(traffic.n_tokens))
    return open_eviction_policy(name, ghost_capacity)


def _load_cost(traffic: Traffic, costs: CostModel) -> LoadCost:
    """Returns an estimate that knows the costs already. The caches count symbols for tokens."""
    cost, n_pages = LoadCost(), 1000
    n_symbols, n_tokens = n_pages * traffic.symbols_per_page, n_pages * traffic.page_size
    cost.add_load(n_symbols, n_tokens * costs.load_us_per_token / 1e6)
    cost.fetch_rate(0).add(n_symbols, n_tokens * costs.fetch_us_per_token / 1e6)
    cost.add_step(n_symbols, n_symbols, n_tokens * costs.compute_us_per_token / 1e6)
    return cost
