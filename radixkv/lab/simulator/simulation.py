"""Replays of a recording with each capacity and policy, plus an infinite capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, thread_time

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.caches import (
    COSTS,
    GHOST_CAPACITY,
    CacheSettings,
    Capacity,
    CostModel,
    Policy,
    ReplayResult,
    ServerTokens,
)
from radixkv.lab.simulator.concurrent_replay import (
    MAX_NUM_BATCHED_TOKENS,
    ConcurrentReplay,
    check_concurrent_replay,
)
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.replay import Replay
from radixkv.lab.simulator.routed_replay import RoutedReplay
from radixkv.lab.simulator.routers import Routing
from radixkv.terminal import Progress


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay: a row of the table and a JSON line. Evictions count whole pages."""

    trace: str
    tokenizer: str | None
    """Name of the tokenizer that encoded the recording; None if it has no texts."""
    rule: str
    page_size: int
    """Tokens per page."""
    concurrency: int | None
    """Requests in flight; None where they arrive at times of their own."""
    max_num_batched_tokens: int | None
    """Maximum tokens per step; None with one request in flight, whose prompt takes one step."""
    n_answer_tokens: int | None
    """Tokens of all answers, which take pages; None if each request ends with its first token."""
    servers: int
    """Servers or replicas, each with caches of these capacities."""
    routing: str | None
    """What the router before several servers knows, or ``replicas``; None with one server."""
    events_delay: int | None
    """Requests that the router sends on before it learns what the events of one say; None with other routing."""
    capacity_tokens: int | None
    """Requested capacity of a server's device; None if infinite."""
    capacity_pages: int | None
    """Capacity of a server's device in whole pages; None if infinite."""
    host_capacity_tokens: int | None
    """Requested capacity of a server's host tier; None without one."""
    disk_capacity_tokens: int | None
    """Requested capacity of a server's disk tier; None without one."""
    policy: str
    """Eviction policy of device and host tier.

    With an infinite capacity, which evicts nothing, the first requested policy."""
    ghost_capacity: float | None
    """Evicted pages that are remembered, as a multiple of the pages cached; None with another policy."""
    ends_known: float
    """Fraction of the requests after which the caches were told which pages no later request uses."""
    hit_rate_pct: float
    """Cached prompt tokens as a percentage of all prompt tokens."""
    of_infinite_pct: float | None
    """Cached tokens as a percentage of those with an infinite capacity; None if these are 0."""
    n_requests: int
    n_prompt_tokens: int
    n_cached_tokens: int
    """Cached prompt tokens, in any tier."""
    n_loaded_tokens: int
    """Cached tokens that were loaded from the host tier."""
    n_fetched_tokens: int
    """Loaded tokens that had been fetched from disk before."""
    saved_seconds: float
    """Time to compute the cached tokens, less the time to copy them from other tiers, by the cost model."""
    load_us_per_token: float
    fetch_us_per_token: float
    compute_us_per_token: float
    n_states: int | None
    """States of recurrent layers on a server's device, all with an infinite capacity; None: there are none."""
    n_evicted_pages: int
    """Pages evicted from the devices."""
    n_evicted_tokens: int
    most_cached_tokens: int
    """Maximum number of tokens that all devices had cached, in whole pages, sampled after each request or step."""
    busiest_server: float | None
    """Prompt tokens that the busiest server computed, as a multiple of the mean; None with one server."""
    server_hit_rates_pct: list[float] | None
    """Hit rate of each server; None with one."""
    n_too_large: int
    """Requests larger than the capacity: they are refused and count as not cached."""
    n_bad_lines: int
    """Malformed lines of the recording that were skipped."""
    kv_bytes_per_token: int | None
    """None if unknown; then all values in bytes are None."""
    capacity_bytes: int | None
    """Capacity of one server's device."""
    evicted_bytes: int | None
    most_cached_bytes: int | None
    seconds: float
    """Wall-clock time of the replay."""
    cpu_seconds: float
    """Processor time of the replay's thread."""


@dataclass(frozen=True)
class Simulation:
    """Replays of a recording with each capacity and policy. Yields their results, the infinite capacity last.

    Before the results of several servers or replicas comes that of one server with the capacity of all of them.
    Takes about 0.1 ms per request and replay, and with routing 2 µs per request and server.

    Raises:
        ConfigError: a capacity is smaller than a page or has a disk tier without a host tier, the step size is not
            a multiple of the page size, there is no policy, what needs the future is asked for with several
            requests in flight or several servers, or several servers are asked for without a routing or, if they
            are not replicas, with several requests in flight. Raised before anything runs.
    """

    recording: Recording
    """The recorded requests."""
    capacities: Sequence[Capacity]
    """Capacities of the tiers, in tokens."""
    policies: Sequence[Policy]
    """One or more; not ``oracle`` if several requests are in flight."""
    kv_bytes_per_token: int | None = None
    """None if unknown."""
    ghost_capacity: float = GHOST_CAPACITY
    """Evicted pages that ``adaptive`` remembers, as a multiple of the pages cached."""
    ends_known: float = 0.0
    """Fraction of the requests after which the caches are told which of their pages no later request uses.

    0 if several requests are in flight.
    """
    costs: CostModel = COSTS
    """Decide whether pages are loaded from the tiers, and give the time saved."""
    concurrency: int = 1
    """Requests in flight."""
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    """Maximum tokens per step; ignored with one request in flight, whose prompt takes one step."""
    answers: Answers | None = None
    """Answers of the requests, with several in flight; None: each request ends with its first token."""
    servers: Sequence[int] = (1,)
    """Numbers of servers, each at least 1.

    More than one need no policy that knows the future, and a single request in flight if they are not replicas.
    """
    routings: Sequence[Routing] = ()
    """What the router before several servers knows, one replay each. ``replicas`` has no others beside it."""
    events_delay: int = 0
    """Requests that the routing ``events`` sends on before it learns what the events of one say."""
    n_states: int | None = None
    """States of recurrent layers that the device of each server keeps, without lower tiers and with requests that
    take steps; None: the model has no such layers."""
    show_progress: bool = False
    """Show the progress of each replay on standard error."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("policies is empty; give one or more")
        future = f"ends_known {self.ends_known:g}" if self.ends_known else ""
        if "oracle" in self.policies:
            future = "policy oracle"
        if self.concurrency > 1 and future:
            raise ConfigError(
                f"{future} needs to know the order of requests, which is not known beforehand with several in "
                "flight; leave it out, or replay with concurrency 1"
            )
        page_size = self.recording.traffic.page_size
        if self.n_states is not None and any(capacity.host is not None for capacity in self.capacities):
            raise ConfigError("states are simulated on the device only; leave the host tier or the states out")
        for capacity in self.capacities:
            if capacity.disk is not None and capacity.host is None:
                raise ConfigError(
                    f"the disk tier of {capacity.disk} tokens needs a host tier; give one, or no disk tier"
                )
            for n_tokens in capacity:
                if n_tokens is not None and n_tokens < page_size:
                    raise ConfigError(f"capacity {n_tokens} holds no page of {page_size} tokens; give more")
        if self._has_steps:
            check_concurrent_replay(self.recording.traffic, self.max_num_batched_tokens)
        if max(self.servers) == 1:
            return
        if not self.routings:
            raise ConfigError("routings is empty; give one or more for several servers")
        if self.concurrency > 1 and not self._has_replicas:
            raise ConfigError(
                f"concurrency {self.concurrency} is for one server; each of several has one request in flight: "
                "leave it out"
            )
        if future:
            raise ConfigError(
                f"{future} needs to know which requests a server gets, which depends on the routing; leave it out, "
                "or replay with one server"
            )

    @property
    def _has_replicas(self) -> bool:
        return "replicas" in self.routings

    @property
    def _has_steps(self) -> bool:
        """Whether requests take the steps of a scheduler, rather than one each."""
        return self.concurrency > 1 or self._has_replicas

    def __iter__(self) -> Iterator[Result]:
        infinite = self._result(None, self.policies[0], None)
        n_cached = infinite.n_cached_tokens
        for capacity in self.capacities:
            for policy in self.policies:
                for n_servers in self.servers:
                    yield self._with_all_states(n_servers)._result(capacity.times(n_servers), policy, n_cached)
                    for routing in self.routings if n_servers > 1 else ():
                        yield self._result(capacity, policy, n_cached, n_servers, routing)
        yield infinite

    def _with_all_states(self, n_servers: int) -> Simulation:
        """Returns this simulation with a device that keeps the states of that many servers together."""
        return self if self.n_states is None else replace(self, n_states=n_servers * self.n_states)

    def _result(
        self,
        capacity: Capacity | None,
        policy: Policy,
        n_cached_tokens_infinite: int | None,
        n_servers: int = 1,
        routing: Routing | None = None,
    ) -> Result:
        replay = partial(self._replay, n_servers=n_servers, routing=routing)
        return self.counted(capacity, policy, n_cached_tokens_infinite, replay, n_servers, routing)

    def counted(
        self,
        capacity: Capacity | None,
        policy: Policy,
        n_cached_tokens_infinite: int | None,
        replay: Callable[[CacheSettings], tuple[ReplayResult, Sequence[ServerTokens]]],
        n_servers: int = 1,
        routing: Routing | None = None,
    ) -> Result:
        """Returns the result of a replay, which it runs.

        Args:
            capacity: of a server; None: infinite.
            policy: eviction policy.
            n_cached_tokens_infinite: cached tokens with an infinite capacity; None: those of this replay.
            replay: returns the counts, and of several servers what each has served.
            n_servers: servers or replicas.
            routing: what the router before several servers knows.
        """
        traffic, started, started_cpu = self.recording.traffic, perf_counter(), thread_time()
        page_size = traffic.page_size
        tiers: tuple[int | None, ...] = (None, None, None) if capacity is None else capacity
        n_pages, host_pages, disk_pages = (None if n is None else n // page_size for n in tiers)
        settings = CacheSettings(
            n_pages, policy, host_pages, disk_pages, self.ghost_capacity, self.costs, self.n_states
        )
        replay_result, by_server = replay(settings)
        computed = [one.n_prompt - one.n_cached for one in by_server]
        use, n_prompt = replay_result.cache_use, sum(traffic.n_tokens)
        n_cached = use.n_cached
        n_cached_infinite = n_cached if n_cached_tokens_infinite is None else n_cached_tokens_infinite
        n_evicted = replay_result.n_evicted_pages * page_size
        max_cached = replay_result.max_cached_pages * page_size
        return Result(
            trace=self.recording.name,
            tokenizer=self.recording.tokenizer,
            rule=traffic.rule,
            page_size=page_size,
            concurrency=self.concurrency,
            max_num_batched_tokens=self.max_num_batched_tokens if self._has_steps else None,
            n_answer_tokens=None if self.answers is None else sum(self.answers.lengths),
            servers=n_servers,
            routing=routing,
            events_delay=self.events_delay if routing == "events" else None,
            capacity_tokens=None if capacity is None else capacity.device,
            capacity_pages=n_pages,
            host_capacity_tokens=None if capacity is None else capacity.host,
            disk_capacity_tokens=None if capacity is None else capacity.disk,
            policy=policy,
            ghost_capacity=self.ghost_capacity if policy == "adaptive" else None,
            ends_known=self.ends_known,
            hit_rate_pct=round(100 * n_cached / n_prompt, 3),
            of_infinite_pct=round(100 * n_cached / n_cached_infinite, 3) if n_cached_infinite else None,
            n_requests=len(traffic.n_tokens),
            n_prompt_tokens=n_prompt,
            n_cached_tokens=n_cached,
            n_loaded_tokens=use.n_loaded,
            n_fetched_tokens=use.n_fetched,
            saved_seconds=round(self.costs.saved_seconds(use), 3),
            load_us_per_token=self.costs.load_us_per_token,
            fetch_us_per_token=self.costs.fetch_us_per_token,
            compute_us_per_token=self.costs.compute_us_per_token,
            n_states=self.n_states,
            n_evicted_pages=replay_result.n_evicted_pages,
            n_evicted_tokens=n_evicted,
            most_cached_tokens=max_cached,
            busiest_server=round(max(computed) * n_servers / sum(computed), 3) if any(computed) else None,
            server_hit_rates_pct=[_pct(one.n_cached, one.n_prompt) for one in by_server] or None,
            n_too_large=replay_result.n_too_large,
            n_bad_lines=self.recording.n_bad_lines,
            kv_bytes_per_token=self.kv_bytes_per_token,
            capacity_bytes=None if n_pages is None else self._bytes(n_pages * page_size),
            evicted_bytes=self._bytes(n_evicted),
            most_cached_bytes=self._bytes(max_cached),
            seconds=round(perf_counter() - started, 3),
            cpu_seconds=round(thread_time() - started_cpu, 3),
        )

    def _replay(
        self, settings: CacheSettings, n_servers: int, routing: Routing | None
    ) -> tuple[ReplayResult, Sequence[ServerTokens]]:
        """Returns the counts, and of several servers what each has served."""
        traffic, n_pages = self.recording.traffic, settings.n_pages
        capacity = "infinite" if n_pages is None else f"{n_pages * traffic.page_size:,} tokens"
        activity = f"replaying {self.recording.name}, capacity {capacity}, policy {settings.policy}"
        if routing is not None:
            activity += f", {n_servers} servers, routing {routing}"
        with Progress(activity, enabled=self.show_progress) as progress:
            if routing is not None and routing != "replicas":
                servers = [Replay(traffic, settings) for _ in range(n_servers)]
                routed = RoutedReplay(traffic, servers, routing, events_delay=self.events_delay)
                return routed.run(progress), routed.by_server
            if not self._has_steps:
                return Replay(traffic, settings, ends_known=self.ends_known).run(progress), ()
            concurrent = ConcurrentReplay(
                traffic, settings, self.concurrency, self.max_num_batched_tokens, self.answers, n_servers
            )
            return concurrent.run(progress), concurrent.by_server if n_servers > 1 else ()

    def _bytes(self, n_tokens: int) -> int | None:
        return None if self.kv_bytes_per_token is None else n_tokens * self.kv_bytes_per_token


def _pct(n: int, n_all: int) -> float:
    return round(100 * n / n_all, 3) if n_all else 0.0
