"""The counters and gauges of a loop, as a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from radixkv.runtime.loop import StepCounters
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.protocols.gate import Gate
from radixkv.runtime.reporting.slot_use import count_slot_use, tables_of
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.wire.stats import KVEvictionStats, Stats


class RequestCount(NamedTuple):
    """Requests by what they do."""

    n_running: int
    n_waiting: int
    """For their grammar, their adapter, their pages, or a step."""


def count_requests(scheduler: Scheduler, gate: Gate, adapters: Adapters) -> RequestCount:
    """Counts the requests of all clients. O(adapters)."""
    n_waiting = len(gate) + adapters.n_waiting() + len(scheduler.waiting) + len(scheduler.tiers)
    return RequestCount(len(scheduler.running), n_waiting)


def count_requests_of(sender: str, scheduler: Scheduler, gate: Gate, adapters: Adapters) -> RequestCount:
    """Counts the requests of a sender. O(loading + waiting for adapters)."""
    n_rows, n_queued = scheduler.shares.count(sender)
    n_loading = sum(request.sender == sender for request in scheduler.tiers.requests())
    n_held = gate.n_waiting(sender) + adapters.n_waiting(sender)
    return RequestCount(n_rows, n_held + n_queued + n_loading)


def make_stats(
    scheduler: Scheduler,
    count_pinned: Callable[[], Sequence[int]],
    count_dropped: Callable[[], KVEvictionStats],
    gate: Gate,
    adapters: Adapters,
    start_seconds: Mapping[str, float],
    stats_id: str,
    counters: StepCounters,
) -> Stats:
    """Returns the message with all counters and gauges. The cost is that of ``count_slot_use``.

    Args:
        scheduler: has the requests.
        count_pinned: returns how many pages pins cover in each tier with a page cache, the device's first.
        count_dropped: returns what requests with a ``kv_budget`` have dropped.
        gate: holds further requests.
        adapters: those that requests may ask for.
        start_seconds: time of each stage of the start.
        stats_id: id of the message that asked for this one.
        counters: what the loop has counted.
    """
    cache = scheduler.cache
    n_pinned, *n_pinned_below = count_pinned()
    host, disk, shared_store = scheduler.tiers.stats()
    if host is not None:
        host = replace(host, n_slots_pinned=n_pinned_below[0])
    requests = count_requests(scheduler, gate, adapters)
    slots = count_slot_use(tables_of((*scheduler.running, *scheduler.running.releasing)), cache.page_size)
    return Stats(
        id=stats_id,
        n_running=requests.n_running,
        n_waiting=requests.n_waiting,
        n_pages=cache.n_pages,
        n_pages_free=cache.n_free,
        n_pages_evictable=cache.n_available - cache.n_free,
        n_pages_pinned=n_pinned,
        prefix_queries_total=counters.prompt_tokens,
        cache_use=counters.cache_use,
        prompt_tokens_total=counters.prompt_tokens,
        generation_tokens_total=counters.generation_tokens,
        preemptions_total=scheduler.n_preemptions,
        recomputed_tokens_total=scheduler.n_recomputed_tokens,
        pages_evicted_total=cache.n_evicted,
        steps_total=counters.steps,
        step_seconds=counters.step_seconds,
        schedule_seconds=counters.schedule_seconds,
        frames_dropped_total=0,
        n_running_slots=slots.n_slots,
        n_running_tokens=slots.n_filled,
        n_duplicate_tokens=slots.n_duplicate,
        n_saved_tokens=slots.n_saved,
        device_busy_seconds=counters.device_busy_seconds,
        start_seconds=dict(start_seconds),
        host=host,
        disk=disk,
        shared_store=shared_store,
        drafts=scheduler.drafts.stats(),
        states=scheduler.states.stats(),
        windows=scheduler.states.window_stats(),
        kv_eviction=count_dropped(),
        pauses=scheduler.returns.stats(),
        adapters=adapters.stats(),
        tenants=scheduler.shares.stats(lambda sender: count_requests_of(sender, scheduler, gate, adapters)),
    )
