"""Replays of a recording with each capacity and policy, plus an infinite capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.simulator.answers import Answers
from radixkv.lab.simulator.caches import COSTS, GHOST_CAPACITY, Capacity, CostModel, Policy, ReplayResult
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
    concurrency: int
    """Requests in flight."""
    max_num_batched_tokens: int | None
    """Maximum tokens per step; None with one request in flight, whose prompt takes one step."""
    n_answer_tokens: int | None
    """Tokens of all answers, which take pages; None if each request ends with its first token."""
    servers: int
    """Servers, each with caches of these capacities."""
    routing: str | None
    """What the router before several servers knows; None with one server."""
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
    """Those of them that were loaded from the host tier."""
    n_fetched_tokens: int
    """Those of the loaded ones that were fetched from disk before."""
    saved_seconds: float
    """Time of computing the cached tokens, less that of copying those from other tiers, by the cost model."""
    load_us_per_token: float
    fetch_us_per_token: float
    compute_us_per_token: float
    n_evicted_pages: int
    """Pages evicted from the devices."""
    n_evicted_tokens: int
    most_cached_tokens: int
    """Maximum number of tokens that all devices had cached, in whole pages, sampled after each request or step."""
    busiest_server: float | None
    """Prompt tokens that the busiest server computed, as a multiple of the mean; None with one server."""
    n_too_large: int
    """Requests larger than the capacity: they are refused and count as not cached."""
    n_bad_lines: int
    """Malformed lines of the recording that were skipped."""
    kv_bytes_per_token: int | None
    """None if unknown; then all values in bytes are None."""
    capacity_bytes: int | None
    """Of one server's device."""
    evicted_bytes: int | None
    most_cached_bytes: int | None
    seconds: float
    """Wall-clock time of the replay."""
    cpu_seconds: float
    """Processor time of the replay's thread."""


def simulate(
    recording: Recording,
    capacities: Sequence[Capacity],
    policies: Sequence[Policy],
    kv_bytes_per_token: int | None = None,
    *,
    ghost_capacity: float = GHOST_CAPACITY,
    ends_known: float = 0.0,
    costs: CostModel = COSTS,
    concurrency: int = 1,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    answers: Answers | None = None,
    servers: Sequence[int] = (1,),
    routings: Sequence[Routing] = (),
    events_delay: int = 0,
    show_progress: bool = False,
) -> Iterator[Result]:
    """Replays a recording with each capacity and policy, and yields the infinite capacity last.

    Before the results of several servers comes that of one server with the capacity of all of them. Takes about
    0.1 ms per request and replay, and with routing 2 µs per request and server.

    Args:
        recording: the recorded requests.
        capacities: of the tiers, in tokens.
        policies: one or more; not ``oracle`` if several requests are in flight.
        kv_bytes_per_token: None if unknown.
        ghost_capacity: evicted pages that ``adaptive`` remembers, as a multiple of the pages cached.
        ends_known: fraction of the requests after which the caches are told which of their pages no later request
            uses; 0 if several requests are in flight.
        costs: decide whether pages are loaded from the tiers, and give the time saved.
        concurrency: requests in flight.
        max_num_batched_tokens: maximum tokens per step; ignored with one request in flight, whose prompt takes one
            step.
        answers: of the requests, with several in flight; None: each request ends with its first token.
        servers: numbers of servers, each at least 1. More than one need a single request in flight, and no policy
            that knows the future.
        routings: what the router before several servers knows, one replay each.
        events_delay: requests that the routing ``events`` sends on before it learns what the events of one say.
        show_progress: show the progress of each replay on standard error.

    Raises:
        ConfigError: a capacity is smaller than a page or has a disk tier without a host tier, the step size is not
            a multiple of the page size, there is no policy, what needs the future is asked for with several
            requests in flight or several servers, or several servers are asked for without a routing or with
            several requests in flight. Raised before anything runs.
    """
    if not policies:
        raise ConfigError("policies is empty; give one or more")
    if concurrency > 1 and ("oracle" in policies or ends_known):
        what = "policy oracle" if "oracle" in policies else f"ends_known {ends_known:g}"
        raise ConfigError(
            f"{what} needs to know the order of requests, which is not known beforehand with several in flight; "
            "leave it out, or replay with concurrency 1"
        )
    page_size = recording.traffic.page_size
    for capacity in capacities:
        if capacity.disk is not None and capacity.host is None:
            raise ConfigError(
                f"the disk tier of {capacity.disk} tokens needs a host tier; give one, or no disk tier"
            )
        for n_tokens in capacity:
            if n_tokens is not None and n_tokens < page_size:
                raise ConfigError(f"capacity {n_tokens} holds no page of {page_size} tokens; give more")
    if concurrency > 1:
        check_concurrent_replay(recording.traffic, max_num_batched_tokens)
    if max(servers) > 1:
        _check_servers(policies, ends_known, concurrency, routings)
    simulation = _Simulation(
        recording,
        kv_bytes_per_token,
        ghost_capacity,
        ends_known,
        costs,
        concurrency,
        max_num_batched_tokens,
        answers,
        events_delay,
        show_progress,
    )
    return simulation.results(capacities, policies, servers, routings)


def _check_servers(
    policies: Sequence[Policy], ends_known: float, concurrency: int, routings: Sequence[Routing]
) -> None:
    if not routings:
        raise ConfigError("routings is empty; give one or more for several servers")
    if concurrency > 1:
        raise ConfigError(
            f"concurrency {concurrency} is for one server; each of several has one request in flight: leave it out"
        )
    if "oracle" in policies or ends_known:
        what = "policy oracle" if "oracle" in policies else f"ends_known {ends_known:g}"
        raise ConfigError(
            f"{what} needs to know which requests a server gets, which depends on the routing; leave it out, or "
            "replay with one server"
        )


@dataclass(frozen=True)
class _Simulation:
    """What all replays of ``simulate`` have in common."""

    recording: Recording
    kv_bytes_per_token: int | None
    ghost_capacity: float
    ends_known: float
    costs: CostModel
    concurrency: int
    max_num_batched_tokens: int
    answers: Answers | None
    events_delay: int
    show_progress: bool

    def results(
        self,
        capacities: Sequence[Capacity],
        policies: Sequence[Policy],
        servers: Sequence[int],
        routings: Sequence[Routing],
    ) -> Iterator[Result]:
        infinite = self._result(None, policies[0], None)
        n_cached = infinite.n_cached_tokens
        for capacity in capacities:
            for policy in policies:
                for n_servers in servers:
                    yield self._result(capacity.times(n_servers), policy, n_cached)
                    for routing in routings if n_servers > 1 else ():
                        yield self._result(capacity, policy, n_cached, n_servers, routing)
        yield infinite

    def _result(
        self,
        capacity: Capacity | None,
        policy: Policy,
        n_cached_tokens_infinite: int | None,
        n_servers: int = 1,
        routing: Routing | None = None,
    ) -> Result:
        traffic, started, started_cpu = self.recording.traffic, perf_counter(), thread_time()
        page_size = traffic.page_size
        tiers: tuple[int | None, ...] = (None, None, None) if capacity is None else capacity
        n_pages, host_pages, disk_pages = (None if n is None else n // page_size for n in tiers)
        computed: Sequence[int] = ()
        if routing is None or n_pages is None:
            replay_result = self._replay(n_pages, host_pages, disk_pages, policy)
        else:
            replay_result, computed = self._routed_replay(
                n_pages, host_pages, disk_pages, policy, n_servers, routing
            )
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
            max_num_batched_tokens=None if self.concurrency == 1 else self.max_num_batched_tokens,
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
            n_evicted_pages=replay_result.n_evicted_pages,
            n_evicted_tokens=n_evicted,
            most_cached_tokens=max_cached,
            busiest_server=round(max(computed) * n_servers / sum(computed), 3) if any(computed) else None,
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
        self, n_pages: int | None, host_pages: int | None, disk_pages: int | None, policy: Policy
    ) -> ReplayResult:
        traffic = self.recording.traffic
        with Progress(self._activity(n_pages, policy), enabled=self.show_progress) as progress:
            if self.concurrency == 1:
                return Replay(
                    traffic,
                    n_pages,
                    policy,
                    host_pages=host_pages,
                    disk_pages=disk_pages,
                    ghost_capacity=self.ghost_capacity,
                    ends_known=self.ends_known,
                    costs=self.costs,
                ).run(progress)
            return ConcurrentReplay(
                traffic,
                n_pages,
                self.concurrency,
                self.max_num_batched_tokens,
                policy,
                host_pages=host_pages,
                disk_pages=disk_pages,
                ghost_capacity=self.ghost_capacity,
                costs=self.costs,
                answers=self.answers,
            ).run(progress)

    def _routed_replay(
        self,
        n_pages: int,
        host_pages: int | None,
        disk_pages: int | None,
        policy: Policy,
        n_servers: int,
        routing: Routing,
    ) -> tuple[ReplayResult, Sequence[int]]:
        """Returns the counts, and the prompt tokens that each server computed."""
        activity = f"{self._activity(n_pages, policy)}, {n_servers} servers, routing {routing}"
        with Progress(activity, enabled=self.show_progress) as progress:
            servers = [
                Replay(
                    self.recording.traffic,
                    n_pages,
                    policy,
                    host_pages=host_pages,
                    disk_pages=disk_pages,
                    ghost_capacity=self.ghost_capacity,
                    costs=self.costs,
                )
                for _ in range(n_servers)
            ]
            replay = RoutedReplay(self.recording.traffic, servers, routing, events_delay=self.events_delay)
            return replay.run(progress), replay.n_computed_tokens

    def _activity(self, n_pages: int | None, policy: Policy) -> str:
        page_size = self.recording.traffic.page_size
        capacity = "infinite" if n_pages is None else f"{n_pages * page_size:,} tokens"
        return f"replaying {self.recording.name}, capacity {capacity}, policy {policy}"

    def _bytes(self, n_tokens: int) -> int | None:
        return None if self.kv_bytes_per_token is None else n_tokens * self.kv_bytes_per_token
