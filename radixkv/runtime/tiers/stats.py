"""Counters and gauges of the tiers, as messages."""

from __future__ import annotations

from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.wire.stats import DiskStats, HostStats, SharedStoreStats


def host_stats(host_tier: HostTier, n_loading: int) -> HostStats:
    """Returns the counters and gauges of the host tier. O(1).

    Args:
        host_tier: fill the tier.
        n_loading: requests that wait for its pages.
    """
    counters, host, cost = host_tier.counters, host_tier.host, host_tier.cost
    return HostStats(
        n_slots=host.n_pages,
        n_slots_free=host.n_free,
        page_bytes=host_tier.copier.page_bytes,
        n_loading=n_loading,
        pages_loaded_total=counters.n_pages_loaded,
        pages_stored_total=counters.n_pages_stored,
        pages_evicted_total=host.n_evicted,
        load_seconds=counters.load_seconds,
        store_seconds=counters.store_seconds,
        copies_failed_total=counters.n_failed,
        hits_computed_total=host_tier.n_hits_computed,
        load_seconds_per_token=cost.load_s_per_token,
        compute_seconds_per_token=cost.compute_s_per_token,
    )


def disk_stats(disk: StorageTier) -> DiskStats:
    """Returns the counters and gauges of a disk tier or shared store. O(1)."""
    counters, counts, health = disk.counters, disk.store.counts, disk.store.health
    shared = None
    if health is not None:
        shared = SharedStoreStats(
            is_away=health.is_away,
            failures_total=health.n_failures,
            lookups_total=disk.n_lookups,
            look_up_seconds=disk.look_up_seconds,
        )
    return DiskStats(
        n_pages=disk.store.n_pages,
        n_bytes=disk.store.n_bytes,
        pages_fetched_total=counters.n_pages_loaded,
        pages_written_total=counts.n_written,
        pages_lost_total=counts.n_lost,
        fetch_seconds=counters.load_seconds,
        write_seconds=counters.store_seconds,
        fetch_seconds_per_token=disk.cost.fetch_s_per_token,
        shared=shared,
    )
