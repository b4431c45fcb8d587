"""Prometheus metrics, from the frontend's latencies and the runtime's ``Stats``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from radixkv.frontend.kept_answers import KeptAnswers
from radixkv.frontend.metrics.aliases import MetricAliases
from radixkv.frontend.metrics.stats_delta import StatsDelta
from radixkv.frontend.miss_counts import MissCounts
from radixkv.wire.cache_messages import Tier
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.stats import (
    AdapterStats,
    DiskStats,
    DraftStats,
    HostStats,
    KVEvictionStats,
    PauseStats,
    ReplicaStats,
    SharedStoreStats,
    StateStats,
    Stats,
    TenantStats,
    WindowStats,
)

PREFIX = "radixkv:"
FINISH_REASONS = ("stop", "tool_calls", "length", "abort", "error")
"""Finish reasons: the first two are complete answers, ``abort`` means that the client left."""

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_Values = Mapping[str, tuple[float | None, str]]
"""Values of metrics with their descriptions, by name; a metric whose value is None is left out."""


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.stats_delta: StatsDelta | None = None
        """The latest statistics delta; None if the server does not log statistics, or its runtime is new."""
        self._n_ended = dict.fromkeys(FINISH_REASONS, 0)
        self._n_canary_rounds = dict.fromkeys(get_args(Tier), 0)
        self._n_canary_failures = dict.fromkeys(get_args(Tier), 0)
        self._first_token = _Durations("time_to_first_token_seconds", "Arrival to first token.", _LONG)
        self._next_token = _Durations("inter_token_latency_seconds", "Between tokens of an answer.", _SHORT)
        self._whole = _Durations("e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self._queue = _Durations("request_queue_time_seconds", "Arrival to first scheduled row.", _LONG)

    def first_token(self, seconds: float) -> None:
        """Records the time from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Records the time between a choice's last token and the next ``count`` tokens."""
        self._next_token.observe(seconds / count, count)

    def done(self, seconds: float, queue_seconds: float) -> None:
        """Records the end-to-end latency of a request and its time in the queue."""
        self._whole.observe(seconds)
        self._queue.observe(queue_seconds)

    def ended(self, reason: str, count: int = 1) -> None:
        """Counts ``count`` choices that ended by ``reason``."""
        self._n_ended[reason] += count

    def count_canary(self, tier: Tier, *, has_failed: bool) -> None:
        """Counts a comparison of an answer from the cache with one without it.

        Args:
            tier: the lowest one that the cached tokens came from.
            has_failed: whether they differ.
        """
        self._n_canary_rounds[tier] += 1
        self._n_canary_failures[tier] += has_failed

    def set_stats_delta(self, stats_delta: StatsDelta | None) -> None:
        """Sets the latest statistics delta; None if there is none."""
        self.stats_delta = stats_delta

    def render(
        self,
        stats: Stats,
        aliases: MetricAliases | None = None,
        kept_answers: KeptAnswers | None = None,
        misses: MissCounts | None = None,
        n_restarts: int = 0,
        tensor_parallel_size: int = 1,
        comparisons: Mapping[str, int] | None = None,
    ) -> bytes:
        """Renders Prometheus' text format. O(series).

        Args:
            stats: of the runtime.
            aliases: repeats the metrics under another engine's names; None for no repetition.
            kept_answers: counts answers in the history of chats; None if they are not kept.
            misses: what requests did not find in the cache; None if nobody counts it.
            n_restarts: how often the runtime was started again.
            tensor_parallel_size: ranks of the model.
            comparisons: requests that were compared with earlier ones, by the result; None if none can be.
        """
        durations = (self._first_token, self._next_token, self._whole, self._queue)
        restarts = {"runtime_restarts": (n_restarts, "Runtime processes started in place of dead ones.")}
        ranks = {"tensor_parallel_size": (tensor_parallel_size, "Ranks that compute the model together.")}
        text = "Answers that have ended."
        families = [
            *(each.family() for each in durations),
            _labelled(CounterMetricFamily, "requests", text, "finish_reason", self._n_ended),
            *_families(stats),
            *_numbers(ranks, restarts),
        ]
        checks, failures = self._n_canary_rounds, self._n_canary_failures
        counts: list[tuple[str, str, str, Mapping[str, float]]] = [
            ("canary_checks", "Answers of the canary from the cache that were compared.", "tier", checks),
            ("canary_failures", "Part of canary_checks that differed without the cache.", "tier", failures),
        ]
        if kept_answers is not None:
            text = (
                "Answers of this server in the history of chats, by whether they are rendered as the model wrote "
                "them."
            )
            rendered = {"same": kept_answers.n_same, "otherwise": kept_answers.n_otherwise}
            counts.append(("history_answers", text, "rendered", rendered))
        if misses is not None:
            n_requests = {reason: one.n_requests for reason, one in misses.by_reason.items()}
            n_lost = {reason: one.n_lost for reason, one in misses.by_reason.items()}
            text = "Requests that lacked a page or more, by the reason."
            counts.append(("cache_misses", text, "reason", n_requests))
            counts.append(("cache_miss_tokens", "Prompt tokens computed for these requests.", "reason", n_lost))
        if comparisons is not None:
            text = (
                "Requests that named an earlier one, by what became of its prefix or the first part that changed."
            )
            counts.append(("cache_comparisons", text, "result", comparisons))
        families += [_labelled(CounterMetricFamily, *each) for each in counts]
        if aliases is not None:
            families += [*aliases.families(families), *aliases.derived(stats, self.stats_delta)]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(families))
        return generate_latest(registry)


def _labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """Returns a family with one label."""
    family = kind(PREFIX + name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


class _Durations:
    """A histogram for one thread, because the library's takes locks, which is too slow for every token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        """Records ``count`` equal durations. O(log buckets)."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def family(self) -> Metric:
        """Returns the histogram so far."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(PREFIX + self._name, self._text, buckets, self._sum)
        family.add_sample(f"{PREFIX}{self._name}_created", {}, self._created)
        return family


@dataclass(frozen=True, eq=False)
class _Collected(Collector):
    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        """Returns the given families."""
        return self.families


def _families(stats: Stats) -> Iterator[Metric]:
    """Yields one family per counter or gauge of ``stats``."""
    used = stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
    gauges = {
        "num_requests_running": (stats.n_running, "Choices that are scheduled."),
        "num_requests_waiting": (stats.n_waiting, "Choices that wait for a step, preempted ones included."),
        "kv_cache_usage_perc": (used / stats.n_pages, "Pages neither free nor evictable; 1 is all."),
        "kv_pages": (stats.n_pages, "Pages in the pool."),
        "kv_pages_free": (stats.n_pages_free, "Pages that hold nothing."),
        "kv_pages_evictable": (stats.n_pages_evictable, "Cached pages that no request holds."),
        "kv_pages_pinned": (stats.n_pages_pinned, "Cached pages that are evicted after all others."),
        "kv_running_slots": (stats.n_running_slots, "Token slots of the pages that running requests hold."),
        "kv_running_tokens": (
            stats.n_running_tokens,
            "Part of kv_running_slots that holds KV: kv_running_tokens / kv_running_slots is memory utilisation.",
        ),
        "kv_duplicate_tokens": (stats.n_duplicate_tokens, "Part of kv_running_tokens that another slot holds too."),
        "kv_saved_tokens": (stats.n_saved_tokens, "Slots that running requests save by sharing pages."),
    }
    counters = {
        "prefix_cache_queries": (stats.prefix_queries_total, "Prompt tokens looked up in the cache."),
        "prefix_cache_hits": (stats.cache_use.n_cached, "Prompt tokens that were not computed."),
        "prompt_tokens": (stats.prompt_tokens_total, "Prompt tokens of requests that were prefilled."),
        "generation_tokens": (stats.generation_tokens_total, "Tokens generated."),
        "num_preemptions": (stats.preemptions_total, "Choices preempted for lack of pages."),
        "recomputed_tokens": (
            stats.recomputed_tokens_total,
            "Tokens computed again for preempted choices; what they find in the cache is not computed again.",
        ),
        "pages_evicted": (stats.pages_evicted_total, "Cached pages evicted."),
        "steps": (stats.steps_total, "Forward passes."),
        "step_seconds": (stats.step_seconds, "Wall time of the loop's turns."),
        "schedule_seconds": (stats.schedule_seconds, "Part of step_seconds for plans and results, cache included."),
        "device_busy_seconds": (
            stats.device_busy_seconds,
            "Time in which the device computed steps; 1 - rate(device_busy_seconds) is the share that it is idle.",
        ),
        "frames_dropped": (stats.frames_dropped_total, "Received frames that were not a valid message."),
    }
    yield from _numbers(gauges, counters)
    text = "Stages of the runtime's start."
    yield _labelled(GaugeMetricFamily, "start_seconds", text, "stage", stats.start_seconds)
    if stats.host is not None:
        yield from _host_families(stats.host, stats.cache_use)
    if stats.disk is not None:
        yield from _disk_families(stats.disk, stats.cache_use)
    if stats.shared_store is not None and stats.shared_store.shared is not None:
        is_alone = stats.disk is None
        yield from _shared_store_families(
            stats.shared_store, stats.shared_store.shared, stats.cache_use, is_alone=is_alone
        )
    if stats.drafts is not None:
        yield from _draft_families(stats.drafts)
    if stats.states is not None:
        yield from _state_families(stats.states)
    if stats.windows is not None:
        yield from _window_families(stats.windows)
    yield from _eviction_families(stats.kv_eviction)
    if stats.pauses is not None:
        yield from _pause_families(stats.pauses)
    if stats.adapters is not None:
        yield from _adapter_families(stats.adapters)
    if stats.tenants:
        yield from _tenant_families(stats.tenants)
    if stats.replicas:
        yield from _replica_families(stats.replicas)


def _replica_families(replicas: Mapping[str, ReplicaStats]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[ReplicaStats], float]], ...] = (
        ("up", "1 while the replica answers.", lambda one: one.is_up),
        ("num_requests_running", "Choices that the replica has scheduled.", lambda one: one.n_running),
        ("num_requests_waiting", "Choices that wait in the replica.", lambda one: one.n_waiting),
        ("kv_pages", "Pages in the replica's pool.", lambda one: one.n_pages),
        ("kv_pages_free", "Pages of the replica that hold nothing.", lambda one: one.n_pages_free),
        ("kv_pages_evictable", "Cached pages that no request of it holds.", lambda one: one.n_pages_evictable),
    )
    counters: tuple[tuple[str, str, Callable[[ReplicaStats], float]], ...] = (
        ("restarts", "Runtime processes started in the replica's place.", lambda one: one.n_restarts),
        ("prefix_cache_queries", "Prompt tokens looked up in its cache.", lambda one: one.prefix_queries_total),
        ("prefix_cache_hits", "Prompt tokens that it did not compute.", lambda one: one.prefix_hits_total),
        ("generation_tokens", "Tokens that it generated.", lambda one: one.generation_tokens_total),
    )
    for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, value in families:
            values = {index: value(one) for index, one in replicas.items()}
            yield _labelled(kind, f"replica_{name}", text, "replica", values)
    text = "Prompts sent to the replica, by why it was chosen."
    placements = CounterMetricFamily(f"{PREFIX}replica_placements", text, labels=["replica", "reason"])
    for index, one in replicas.items():
        for reason, count in one.placements_total.items():
            placements.add_metric([index, reason], count)
    yield placements


def _adapter_families(adapters: AdapterStats) -> Iterator[Metric]:
    gauges: _Values = {
        "loras_loaded": (adapters.n_adapters, "Adapters that requests may ask for by their names."),
        "loras_unloaded": (
            adapters.n_unloaded,
            "Unloaded and replaced adapters whose weights are kept for requests that came before.",
        ),
        "lora_bytes": (
            adapters.n_bytes,
            "Host memory of the weights of adapters, also of unloaded ones whose requests still run.",
        ),
        "loras_in_slots": (adapters.n_in_slots, "Adapters that steps can have now."),
        "lora_requests_waiting": (adapters.n_waiting, "Requests that wait for a slot of their adapter."),
    }
    yield from _numbers(
        gauges, {"lora_slot_loads": (adapters.slot_loads_total, "Times that an adapter got a slot.")}
    )


def _draft_families(drafts: DraftStats) -> Iterator[Metric]:
    counters = {
        "spec_decode_num_drafts": (drafts.drafts_total, "Rows of answers with drafts."),
        "spec_decode_num_draft_tokens": (drafts.draft_tokens_total, "Tokens that were guessed."),
        "spec_decode_num_accepted_tokens": (drafts.accepted_tokens_total, "Guesses that were what was sampled."),
        "spec_decode_num_steps_without_overlap": (
            drafts.steps_without_overlap_total,
            "Steps planned after all results before them: the host did not work beside the device.",
        ),
    }
    yield from _numbers({}, counters)
    drafted = {source: one.draft_tokens_total for source, one in drafts.by_source.items()}
    accepted = {source: one.accepted_tokens_total for source, one in drafts.by_source.items()}
    for name, values, text in (
        ("draft_tokens", drafted, "Part of spec_decode_num_draft_tokens by what guessed them."),
        ("accepted_tokens", accepted, "Part of spec_decode_num_accepted_tokens by what guessed them."),
    ):
        yield _labelled(CounterMetricFamily, f"spec_decode_num_{name}_by_source", text, "source", values)
    text = "Part of spec_decode_num_accepted_tokens by the place of the draft in its row, the first is 0."
    places = {str(place): count for place, count in enumerate(drafts.accepted_by_position)}
    yield _labelled(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, "position", places)


def _state_families(states: StateStats) -> Iterator[Metric]:
    gauges: _Values = {
        "state_slots": (states.n_slots, "States of recurrent layers that the prefix cache can keep."),
        "state_slots_free": (states.n_slots_free, "States that it could keep without evicting one."),
    }
    counters: _Values = {
        "states_saved": (states.saved_total, "States that were computed for the prefix cache."),
        "state_hits": (states.hits_total, "Times that a prompt went on from one of them."),
        "states_evicted": (states.evicted_total, "States that gave their slots to others; pages stayed."),
        "state_missed_tokens": (
            states.missed_tokens_total,
            "Prompt tokens computed although their pages were cached, because no state was after them.",
        ),
    }
    yield from _numbers(gauges, counters)


def _eviction_families(dropped: KVEvictionStats) -> Iterator[Metric]:
    counters: _Values = {
        "kv_eviction_pages_skipped": (
            dropped.pages_skipped_total,
            "Pages that answers with a kv_budget went on without, and that stayed in the prefix cache.",
        ),
        "kv_eviction_pages_freed": (
            dropped.pages_freed_total,
            "Pages that answers with a kv_budget went on without, and that were freed.",
        ),
    }
    yield from _numbers({}, counters)


def _window_families(windows: WindowStats) -> Iterator[Metric]:
    gauges: _Values = {
        "window_pages": (windows.n_window_pages, "Window pages that requests or the prefix cache hold."),
        "window_pages_evictable": (windows.n_window_pages_evictable, "Those that the prefix cache alone holds."),
        "window_slabs": (windows.n_slabs, "Slabs that are a window page, or several pages of the other layers."),
        "window_slabs_taken": (windows.n_slabs_taken, "Those that are a window page now."),
        "window_tails": (windows.n_tails, "Positions where a prompt can go on, with the window pages before them."),
    }
    counters: _Values = {
        "window_tails_kept": (windows.tails_kept_total, "Such positions that were computed for the prefix cache."),
        "window_tail_hits": (windows.hits_total, "Times that a prompt went on from one of them."),
        "window_tails_evicted": (windows.evicted_total, "Those whose window pages went; other pages stayed."),
        "window_missed_tokens": (
            windows.missed_tokens_total,
            "Prompt tokens computed although their pages were cached, because no window pages were before them.",
        ),
    }
    yield from _numbers(gauges, counters)


def _pause_families(pauses: PauseStats) -> Iterator[Metric]:
    gauges: _Values = {
        "pauses": (pauses.n_pauses, "Chats that are expected to go on, with results of tools or by their users."),
        "pause_spared_tokens": (pauses.n_spared_tokens, "Tokens of those that are evicted late."),
    }
    counters: _Values = {
        "pause_returns": (pauses.returns_total, "Chats that went on."),
        "pause_returns_on_device": (pauses.returns_on_device_total, "Those that were in the pool as a whole."),
        "pauses_given_up": (pauses.given_up_total, "Chats that paused for too long."),
    }
    yield from _numbers(gauges, counters)


def _host_families(host: HostStats, cache_use: CacheUse) -> Iterator[Metric]:
    gauges: dict[str, tuple[float | None, str]] = {
        "num_requests_loading": (host.n_loading, "Part of num_requests_waiting: wait for pages of the host tier."),
        "host_slots": (host.n_slots, "Pages that the host tier can hold; grows while its memory is prepared."),
        "host_slots_free": (host.n_slots_free, "Pages that the host tier could take without evicting."),
        "host_slots_pinned": (host.n_slots_pinned, "Pages that the host tier evicts after all others."),
        "host_page_bytes": (host.page_bytes, "Size of a page."),
        "load_seconds_per_token": (host.load_seconds_per_token, "Loading a token from the host tier."),
        "compute_seconds_per_token": (host.compute_seconds_per_token, "Computing a token of a prompt."),
    }
    counters: _Values = {
        "host_prefix_cache_hits": (cache_use.n_loaded, "Part of prefix_cache_hits: loaded from the host tier."),
        "host_pages_loaded": (host.pages_loaded_total, "Pages copied from the host tier to the device."),
        "host_pages_loaded_ahead": (
            host.pages_loaded_ahead_total,
            "Part of host_pages_loaded: before a request could be admitted, or for chats that are expected back.",
        ),
        "host_pages_loaded_ahead_used_by_waiting": (
            host.pages_loaded_ahead_used_by_waiting_total,
            "Those of them that were loaded for a waiting request, and on the device when it was admitted.",
        ),
        "host_pages_stored": (host.pages_stored_total, "Pages copied from the device to the host tier."),
        "host_pages_evicted": (host.pages_evicted_total, "Pages evicted from the host tier."),
        "host_load_seconds": (host.load_seconds, "Time of the copies to the device."),
        "host_store_seconds": (host.store_seconds, "Time of the copies to the host tier."),
        "host_copies_failed": (host.copies_failed_total, "Copies that failed, in either direction."),
    }
    if host.n_state_slots:
        gauges["host_state_slots"] = host.n_state_slots, "States of recurrent layers that the host tier can hold."
        gauges["host_state_slots_free"] = host.n_state_slots_free, "States that it could take without evicting one."
    yield from _numbers(gauges, counters)
    declined = {
        "load": host.loads_declined_total,
        "fetch": host.fetches_declined_total,
        "lookup": host.lookups_declined_total,
    }
    text = (
        "Loads from the host tier, fetches and lookups that a prompt went without, because they would take longer "
        "than they save, or by --load-policy never."
    )
    yield _labelled(CounterMetricFamily, "tier_steps_declined", text, "step", declined)


def _disk_families(disk: DiskStats, cache_use: CacheUse) -> Iterator[Metric]:
    """Yields the families of the cache folder."""
    n_hits = cache_use.n_fetched - cache_use.n_shared
    gauges: _Values = {
        "disk_pages": (disk.n_pages, "Pages in the cache folder, with those of other models."),
        "disk_bytes": (disk.n_bytes, "Bytes that these pages occupy."),
        "fetch_seconds_per_token": (disk.fetch_seconds_per_token, "Fetching a token from disk."),
    }
    counters: _Values = {
        "disk_prefix_cache_hits": (n_hits, "Part of host_prefix_cache_hits: came from disk."),
        "disk_pages_fetched": (disk.pages_fetched_total, "Pages copied from disk to the host tier."),
        "disk_pages_written": (disk.pages_written_total, "Pages written to disk."),
        "disk_pages_lost": (disk.pages_lost_total, "Pages on disk that were damaged or had vanished."),
        "disk_fetch_seconds": (disk.fetch_seconds, "Time of the copies from disk."),
        "disk_write_seconds": (disk.write_seconds, "Time of the copies to disk."),
    }
    yield from _numbers(gauges, counters)


def _shared_store_families(
    disk: DiskStats, shared: SharedStoreStats, cache_use: CacheUse, *, is_alone: bool
) -> Iterator[Metric]:
    rate = "fetch_seconds_per_token" if is_alone else "store_fetch_seconds_per_token"
    missed = "Pages that the shared store had, and that were damaged or had vanished."
    hits = "Part of host_prefix_cache_hits: came from the shared store."
    gauges: _Values = {
        "store_is_away": (shared.is_away, "1 while the shared store fails or is slow; prompts are computed then."),
        "store_pages": (disk.n_pages, "Pages that the shared store is known to have."),
        "store_bytes": (disk.n_bytes, "Bytes of these pages."),
        rate: (disk.fetch_seconds_per_token, "Fetching a token from the store."),
    }
    counters: _Values = {
        "store_prefix_cache_hits": (cache_use.n_shared, hits),
        "store_pages_fetched": (disk.pages_fetched_total, "Pages copied from the shared store to the host tier."),
        "store_pages_written": (disk.pages_written_total, "Pages written to the shared store."),
        "store_pages_missed": (disk.pages_lost_total, missed),
        "store_fetch_seconds": (disk.fetch_seconds, "Time of the copies from the shared store."),
        "store_write_seconds": (disk.write_seconds, "Time of the copies to the shared store."),
        "store_lookups": (shared.lookups_total, "Prompts for which the shared store was asked."),
        "store_lookup_seconds": (shared.look_up_seconds, "Time of these lookups; each prompt waits for its own."),
        "store_failures": (shared.failures_total, "Calls of the shared store that failed or took too long."),
    }
    yield from _numbers(gauges, counters)


def _tenant_families(tenants: Mapping[str, TenantStats]) -> Iterator[Metric]:
    running = {name: one.n_running for name, one in tenants.items()}
    waiting = {name: one.n_waiting for name, one in tenants.items()}
    pages = {name: one.n_pages for name, one in tenants.items() if one.n_pages is not None}
    computed = {name: one.computed_tokens_total for name, one in tenants.items()}
    for name, values, text in (
        ("num_requests_running", running, "Rows of a tenant."),
        ("num_requests_waiting", waiting, "Choices of a tenant that wait for a step."),
        ("kv_pages", pages, "Pages of a tenant with a share of them, cached or in use."),
    ):
        yield _labelled(GaugeMetricFamily, f"tenant_{name}", text, "tenant", values)
    text = "Tokens computed for a tenant."
    yield _labelled(CounterMetricFamily, "tenant_computed_tokens", text, "tenant", computed)


def _numbers(gauges: _Values, counters: _Values) -> Iterator[Metric]:
    """Yields a family for each value and its description, by name."""
    for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (value, text) in values.items():
            if value is not None:
                yield kind(PREFIX + name, text, value=value)
