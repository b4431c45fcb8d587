"""The counters of several replicas as those of one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixkv.frontend.replicas.joint_replies import MEANS, QUANTILES, added
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.stats import ReplicaStats, SourceStats, Stats

_KEPT_ENDINGS = ("_total", "_seconds")
"""Endings of the names of counters."""
_KEPT = frozenset({"page_bytes"})
"""Fields that are no counters, and do not change."""


class JointStats:
    """Adds the counters and gauges of replicas, of which some may not answer.

    A counter of the server never falls: what a replica has counted stays when it dies or is silent, and when
    another runtime takes its place, which begins anew.

    Args:
        n_replicas: at least one.
    """

    def __init__(self, n_replicas: int) -> None:
        self._last: list[Stats | None] = [None] * n_replicas
        """Counters that each runtime had when it answered last."""
        self._ended: list[Stats | None] = [None] * n_replicas
        """Counters of the runtimes that have died in each place."""
        self._n_restarts = [0] * n_replicas

    def add(self, stats: Mapping[int, Stats], n_restarts: Sequence[int]) -> Stats:
        """Returns the sums, with ``Stats.replicas``. O(fields * replicas).

        Args:
            stats: of the replicas that have answered, by number; at least one.
            n_restarts: how often each replica was started again.
        """
        of_each: list[Stats] = []
        replicas: dict[str, ReplicaStats] = {}
        for index, count in enumerate(n_restarts):
            if count != self._n_restarts[index]:
                self._ended[index] = added([self._ended[index], self._last[index]])
                self._last[index], self._n_restarts[index] = None, count
            now = stats.get(index)
            if now is not None:
                self._last[index] = _counters(now)
            one: Stats | None = added([now or self._last[index], self._ended[index]])
            replicas[str(index)] = _of_replica(one, is_up=now is not None, n_restarts=count)
            if one is not None:
                of_each.append(one)
        joint: Stats = added(of_each)
        if joint.shared_store is not None:  # all have the same one
            stores = [one.shared_store for one in of_each if one.shared_store is not None]
            n_pages, n_bytes = max(store.n_pages for store in stores), max(store.n_bytes for store in stores)
            store = msgspec.structs.replace(joint.shared_store, n_pages=n_pages, n_bytes=n_bytes)
            joint = msgspec.structs.replace(joint, shared_store=store)
        # The share of time in which a device is busy, as that of one device.
        busy_s = joint.device_busy_seconds / len(n_restarts)
        return msgspec.structs.replace(joint, replicas=replicas, device_busy_seconds=busy_s)


def _of_replica(stats: Stats | None, *, is_up: bool, n_restarts: int) -> ReplicaStats:
    if stats is None:
        return ReplicaStats(is_up, n_restarts)
    return ReplicaStats(
        is_up,
        n_restarts,
        n_running=stats.n_running,
        n_waiting=stats.n_waiting,
        n_pages=stats.n_pages,
        n_pages_free=stats.n_pages_free,
        n_pages_evictable=stats.n_pages_evictable,
        prefix_queries_total=stats.prefix_queries_total,
        prefix_hits_total=stats.prefix_hits_total,
        generation_tokens_total=stats.generation_tokens_total,
    )


def _counters(value: Any, name: str = "") -> Any:
    """Returns statistics without their gauges: these are 0, and moving averages None."""
    if isinstance(value, CacheUse | SourceStats) or name in _KEPT or name.endswith(_KEPT_ENDINGS):
        return value
    if isinstance(value, msgspec.Struct):
        return type(value)(**{field: _counters(getattr(value, field), field) for field in value.__struct_fields__})
    if isinstance(value, dict):
        return {key: _counters(one, name) for key, one in value.items()}
    if name in MEANS | QUANTILES:
        return None
    return type(value)(0) if isinstance(value, int | float) else value
