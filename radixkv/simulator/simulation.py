"""All replays of a recording: each capacity with each policy, and an infinite one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter, thread_time

import msgspec

from radixkv.errors import ConfigError
from radixkv.simulator.concurrent_replay import MAX_NUM_BATCHED_TOKENS, Crowd, check_crowd
from radixkv.simulator.recording import Recording
from radixkv.simulator.replay import Policy, Replay, Replayed


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table. Counts of evictions are in tokens of whole pages."""

    trace: str
    tokenizer: str | None
    """Of a recording of texts; None: it held none."""
    rule: str
    page_size: int
    concurrency: int
    """Requests in flight."""
    max_num_batched_tokens: int | None
    """Of a step; None with one request in flight, which is computed in one."""
    capacity_tokens: int | None
    """As asked for; None: infinite."""
    capacity_pages: int | None
    policy: str
    """Of an infinite capacity, which evicts nothing, the first that was asked for."""
    hit_rate_pct: float
    """Prompt tokens that were cached, of all."""
    of_infinite_pct: float | None
    """Cached tokens, of those that an infinite capacity has; None if that has none."""
    n_requests: int
    n_prompt_tokens: int
    n_cached_tokens: int
    n_evicted_pages: int
    n_evicted_tokens: int
    most_cached_tokens: int
    """Of the pages that were cached after any of the requests."""
    n_too_large: int
    """Requests that do not fit into the capacity: never cached."""
    n_bad_lines: int
    kv_bytes_per_token: int | None
    """None: not known, and so are the figures in bytes."""
    capacity_bytes: int | None
    evicted_bytes: int | None
    most_cached_bytes: int | None
    seconds: float
    """What the replay took,"""
    cpu_seconds: float
    """and of that on the processor."""


def simulate(
    recording: Recording,
    capacities: Sequence[int],
    policies: Sequence[Policy],
    kv_bytes_per_token: int | None = None,
    *,
    concurrency: int = 1,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
) -> Iterator[Result]:
    """Each capacity, in tokens, with each policy, and last an infinite one. Some 0.1 ms a request and replay.

    Args:
        recording: what is replayed.
        capacities: in tokens.
        policies: one or more; ``lru`` alone if several requests are in flight.
        kv_bytes_per_token: None if it is not known.
        concurrency: requests in flight.
        max_num_batched_tokens: most tokens a step, if these are several; one alone is computed in one step.

    Raises:
        ConfigError: a capacity that holds no page, a step that is not of whole pages, no policy, or another one
            than ``lru`` with several requests in flight; before anything runs.
    """
    if not policies or (concurrency > 1 and tuple(policies) != ("lru",)):
        named = ", ".join(policies) or "none"
        raise ConfigError(
            f"policies {named}: give one or more, and with several requests in flight lru alone, since who is next "
            "is not known before"
        )
    page_size = recording.traffic.page_size
    for capacity in capacities:
        if capacity < page_size:
            raise ConfigError(f"capacity {capacity} holds no page of {page_size} tokens; give more")
    if concurrency > 1:
        check_crowd(recording.traffic, max_num_batched_tokens)
    simulation = _Simulation(recording, kv_bytes_per_token, concurrency, max_num_batched_tokens)
    return simulation.results(capacities, policies)


class _Simulation:
    def __init__(
        self,
        recording: Recording,
        kv_bytes_per_token: int | None,
        concurrency: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._recording = recording
        self._kv_bytes_per_token = kv_bytes_per_token
        self._concurrency = concurrency
        self._max_num_batched_tokens = max_num_batched_tokens

    def results(self, capacities: Sequence[int], policies: Sequence[Policy]) -> Iterator[Result]:
        infinite = self._result(None, policies[0], None)
        for capacity in capacities:
            for policy in policies:
                yield self._result(capacity, policy, infinite.n_cached_tokens)
        yield infinite

    def _result(self, capacity: int | None, policy: Policy, n_cached_tokens_infinite: int | None) -> Result:
        traffic, begun, begun_cpu = self._recording.traffic, perf_counter(), thread_time()
        page_size = traffic.page_size
        n_pages = None if capacity is None else capacity // page_size
        replayed = self._replayed(n_pages, policy)
        n_cached, n_prompt = sum(replayed.n_cached_tokens), sum(traffic.n_tokens)
        optimum = n_cached if n_cached_tokens_infinite is None else n_cached_tokens_infinite
        n_evicted = replayed.n_evicted_pages * page_size
        most_cached = replayed.most_cached_pages * page_size
        return Result(
            trace=self._recording.name,
            tokenizer=self._recording.tokenizer,
            rule=traffic.rule,
            page_size=page_size,
            concurrency=self._concurrency,
            max_num_batched_tokens=None if self._concurrency == 1 else self._max_num_batched_tokens,
            capacity_tokens=capacity,
            capacity_pages=n_pages,
            policy=policy,
            hit_rate_pct=round(100 * n_cached / n_prompt, 3),
            of_infinite_pct=round(100 * n_cached / optimum, 3) if optimum else None,
            n_requests=len(traffic.n_tokens),
            n_prompt_tokens=n_prompt,
            n_cached_tokens=n_cached,
            n_evicted_pages=replayed.n_evicted_pages,
            n_evicted_tokens=n_evicted,
            most_cached_tokens=most_cached,
            n_too_large=replayed.n_too_large,
            n_bad_lines=self._recording.n_bad_lines,
            kv_bytes_per_token=self._kv_bytes_per_token,
            capacity_bytes=None if n_pages is None else self._bytes(n_pages * page_size),
            evicted_bytes=self._bytes(n_evicted),
            most_cached_bytes=self._bytes(most_cached),
            seconds=round(perf_counter() - begun, 3),
            cpu_seconds=round(thread_time() - begun_cpu, 3),
        )

    def _replayed(self, n_pages: int | None, policy: Policy) -> Replayed:
        traffic = self._recording.traffic
        if self._concurrency == 1:
            return Replay(traffic, n_pages, policy).run()
        return Crowd(traffic, n_pages, self._concurrency, self._max_num_batched_tokens).run()

    def _bytes(self, n_tokens: int) -> int | None:
        return None if self._kv_bytes_per_token is None else n_tokens * self._kv_bytes_per_token
