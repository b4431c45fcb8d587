"""The counters and gauges of a loop, as a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from radixkv.runtime.cache.timed import TimedPageCache
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.loop import StepCounters
from radixkv.runtime.reporting.slot_use import count_slot_use
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.runtime.tiers.disk_tier import DiskTier
from radixkv.runtime.tiers.transfers import Transfers
from radixkv.settings.tenants import OPERATOR
from radixkv.wire.stats import DiskStats, HostStats, SharedStoreStats, Stats, TenantStats


class RequestCount(NamedTuple):
    """Requests by what they do."""

    n_running: int
    n_waiting: int
    """For their grammar, their pages, or a step."""


def count_requests(scheduler: Scheduler, gate: GrammarGate) -> RequestCount:
    """Counts the requests of all clients. O(1)."""
    n_waiting = len(gate) + len(scheduler.waiting) + len(scheduler.loading)
    return RequestCount(len(scheduler.running), n_waiting)


def count_requests_of(tenants: Iterable[str], scheduler: Scheduler, gate: GrammarGate) -> dict[str, RequestCount]:
    """Counts the requests of each of some tenants. O(tenants + loading)."""
    queue = scheduler.fair_queue
    assert queue is not None, "there are tenants"
    n_loading = Counter(request.tenant for request in scheduler.loading.requests())
    return {
        tenant: RequestCount(
            scheduler.rows.n_rows(tenant),
            gate.n_waiting(tenant) + queue.n_waiting(tenant) + n_loading[tenant],
        )
        for tenant in tenants
    }


def make_stats(
    scheduler: Scheduler,
    cache: TimedPageCache,
    transfers: Transfers | None,
    pins: Pins,
    gate: GrammarGate,
    start_seconds: Mapping[str, float],
    stats_id: str,
    counters: StepCounters,
) -> Stats:
    """Returns the message with all counters and gauges. The cost is that of ``count_slot_use``."""
    pins.expire()
    requests = count_requests(scheduler, gate)
    slots = count_slot_use(scheduler.running.tables(), cache.page_size)
    return Stats(
        id=stats_id,
        n_running=requests.n_running,
        n_waiting=requests.n_waiting,
        n_pages=cache.n_pages,
        n_pages_free=cache.n_free,
        n_pages_evictable=cache.n_available - cache.n_free,
        n_pages_pinned=pins.device.n_pages,
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
        cache_seconds=cache.seconds,
        attention_seconds=counters.attention_seconds,
        frames_dropped_total=0,
        n_running_slots=slots.n_slots,
        n_running_tokens=slots.n_filled,
        n_duplicate_tokens=slots.n_duplicate,
        n_saved_tokens=slots.n_saved,
        device_busy_seconds=counters.device_busy_seconds,
        start_seconds=dict(start_seconds),
        host=None if transfers is None else _host_stats(scheduler, transfers, pins),
        disk=None if transfers is None or transfers.disk is None else _disk_stats(transfers.disk),
        tenants=_tenant_stats(scheduler, gate),
    )


def _tenant_stats(scheduler: Scheduler, gate: GrammarGate) -> dict[str, TenantStats]:
    if scheduler.fair_queue is None:
        return {}
    n_computed = scheduler.fair_queue.n_computed
    counts = count_requests_of(n_computed.keys() - {OPERATOR}, scheduler, gate)
    return {
        tenant: TenantStats(
            *counts[tenant],
            computed_tokens_total=n_tokens,
            n_pages=scheduler.cache.tenants.n_owned.get(tenant),
        )
        for tenant, n_tokens in n_computed.items()
        if tenant != OPERATOR
    }


def _host_stats(scheduler: Scheduler, transfers: Transfers, pins: Pins) -> HostStats:
    counters, host, cost = transfers.counters, transfers.host, transfers.cost
    return HostStats(
        n_slots=host.n_pages,
        n_slots_free=host.n_free,
        n_slots_pinned=0 if pins.host is None else pins.host.n_pages,
        page_bytes=transfers.copier.page_bytes,
        n_loading=len(scheduler.loading),
        pages_loaded_total=counters.n_pages_loaded,
        pages_stored_total=counters.n_pages_stored,
        pages_evicted_total=host.n_evicted,
        load_seconds=counters.load_seconds,
        store_seconds=counters.store_seconds,
        copies_failed_total=counters.n_failed,
        hits_computed_total=counters.n_computed,
        load_seconds_per_token=cost.load_s_per_token,
        compute_seconds_per_token=cost.compute_s_per_token,
    )


def _disk_stats(disk: DiskTier) -> DiskStats:
    counters, counts, health = disk.counters, disk.store.counts, disk.store.health
    shared = None
    if health is not None:
        shared = SharedStoreStats(
            is_away=health.is_away,
            failures_total=health.n_failures,
            lookups_total=counters.n_lookups,
            look_up_seconds=counters.look_up_seconds,
        )
    return DiskStats(
        n_pages=disk.store.n_pages,
        n_bytes=disk.store.n_bytes,
        pages_fetched_total=counters.n_pages_fetched,
        pages_written_total=counts.n_written,
        pages_lost_total=counts.n_lost,
        fetch_seconds=counters.fetch_seconds,
        write_seconds=counters.write_seconds,
        fetch_seconds_per_token=disk.cost.fetch_s_per_token,
        shared=shared,
    )
