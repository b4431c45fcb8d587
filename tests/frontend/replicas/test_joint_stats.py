"""The counters of several replicas as those of one server, while they die, are silent and come back."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from radixkv.frontend.replicas.joint_stats import JointStats
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.stats import (
    AdapterStats,
    DiskStats,
    DraftStats,
    HostStats,
    PauseKindStats,
    PauseStats,
    ReplicaStats,
    SharedStoreStats,
    SourceStats,
    Stats,
    TenantStats,
)


def host(value: int) -> HostStats:
    return HostStats(*(value for _ in range(13)), float(value) if value else None, 2.0 * value, value)


def stats(value: int) -> Stats:
    return Stats(
        f"id-{value}",
        n_running=value,
        n_pages=10 * value,
        n_pages_free=value,
        cache_use=CacheUse(5 * value, value),
        prefix_queries_total=7 * value,
        step_seconds=0.5 * value,
        start_seconds={"imports": float(value), f"only {value}": 1.0},
        host=host(value),
        drafts=DraftStats(
            value, 2 * value, value, by_source={"tree": SourceStats(value, 0)}, accepted_by_position=(value, 1)
        ),
        tenants={"a": TenantStats(value, 0, 3), f"b{value}": TenantStats(1, 1, 1)},
    )


def test_counters_and_gauges_are_added() -> None:
    joint = JointStats(2).add({0: stats(1), 1: stats(3)}, [0, 2])
    assert (joint.n_running, joint.n_pages, joint.prefix_queries_total, joint.step_seconds) == (4, 40, 28, 2.0)
    assert joint.cache_use == CacheUse(20, 4)
    assert joint.drafts is not None
    assert joint.drafts.by_source == {"tree": SourceStats(4, 0)}
    assert joint.drafts.accepted_by_position == (4, 2)
    assert joint.tenants == {"a": TenantStats(4, 0, 6), "b1": TenantStats(1, 1, 1), "b3": TenantStats(1, 1, 1)}
    assert joint.disk is None


def test_sizes_and_rates_are_not_added() -> None:
    joint = JointStats(2).add({0: stats(1), 1: stats(3)}, [0, 0])
    assert joint.start_seconds == {"imports": 3.0, "only 1": 1.0, "only 3": 1.0}
    assert joint.host is not None
    assert joint.host.page_bytes == 3
    assert joint.host.load_seconds_per_token == 2.0
    assert joint.host.n_slots == 4


def test_pauses_of_a_kind_are_added() -> None:
    of_each = [
        {"\0search": PauseKindStats(1, 6, 4, 2, 2.0, 4.0), "": PauseKindStats(1, 0, 0, 0)},
        {"\0search": PauseKindStats(2, 2, 0, 0, 4.0, 8.0)},
    ]
    joint = JointStats(2)
    both = {index: Stats("a", pauses=PauseStats(1, 0, 0, 0, 0, kinds)) for index, kinds in enumerate(of_each)}
    pauses = joint.add(both, [0, 0]).pauses
    assert pauses is not None
    assert pauses.kinds == {"\0search": PauseKindStats(3, 8, 4, 2, 2.5, 5.0), "": PauseKindStats(1, 0, 0, 0)}
    pauses = joint.add({1: both[1]}, [0, 0]).pauses
    assert pauses is not None
    assert pauses.kinds["\0search"] == PauseKindStats(2, 8, 4, 2, 4.0, 8.0)


def test_as_many_kinds_are_shown_as_of_one_replica() -> None:
    """The kinds of runtimes that have died do not pile up either."""
    joint = JointStats(2)
    for n_restarts in range(5):
        of_each = [
            {
                f"\0{n_restarts} {index} {number}": PauseKindStats(0, number, 0, 0, 1.0, 1.0)
                for number in range(1, 17)
            }
            for index in range(2)
        ]
        both = {index: Stats("a", pauses=PauseStats(0, 0, 0, 0, 0, kinds)) for index, kinds in enumerate(of_each)}
        pauses = joint.add(both, [n_restarts, n_restarts]).pauses
        assert pauses is not None
        counts = [kind.returns_total for kind in pauses.kinds.values()]
        seen = sorted([*range(1, 17)] * 2 * (n_restarts + 1), reverse=True)
        assert counts == seen[:16]


def test_each_replica_is_shown_those_that_are_down_too() -> None:
    joint = JointStats(2).add({1: stats(3)}, [4, 2])
    down, up = joint.replicas["0"], joint.replicas["1"]
    assert down == ReplicaStats(is_up=False, n_restarts=4)
    assert (up.is_up, up.n_restarts, up.n_running, up.n_pages, up.prefix_hits_total) == (True, 2, 3, 30, 15)
    assert msgspec.structs.replace(joint, replicas={}) == stats(3)


def test_counters_stay_and_gauges_go_while_a_replica_does_not_answer() -> None:
    joint = JointStats(2)
    both = joint.add({0: stats(1), 1: stats(3)}, [0, 0])
    one = joint.add({0: stats(1)}, [0, 0])
    assert one.cache_use == both.cache_use
    assert (one.prefix_queries_total, one.step_seconds) == (both.prefix_queries_total, both.step_seconds)
    assert one.drafts == both.drafts
    assert one.tenants["a"] == TenantStats(1, 0, 6)
    assert (one.n_running, one.n_pages) == (1, 10)
    assert one.host is not None
    assert (one.host.n_slots, one.host.pages_loaded_total, one.host.load_seconds_per_token) == (1, 4, 1.0)
    silent = one.replicas["1"]
    assert (silent.is_up, silent.n_running, silent.prefix_queries_total) == (False, 0, 21)
    assert joint.add({0: stats(1), 1: stats(3)}, [0, 0]) == both


def test_counters_of_a_runtime_that_died_are_added_to_those_of_the_next() -> None:
    joint = JointStats(2)
    totals = [
        joint.add(answers, [0, n_restarts]).prefix_queries_total
        for answers, n_restarts in (
            ({0: stats(1), 1: stats(3)}, 0),
            ({0: stats(1)}, 0),
            ({0: stats(2)}, 1),
            ({0: stats(2), 1: stats(1)}, 1),
            ({0: stats(2), 1: stats(2)}, 1),
            ({0: stats(2), 1: stats(1)}, 2),
        )
    ]
    assert [total // 7 for total in totals] == [4, 4, 5, 6, 7, 8]


def test_devices_are_busy_for_the_mean_of_their_times() -> None:
    joint = JointStats(2).add(
        {index: Stats("a", device_busy_seconds=seconds) for index, seconds in enumerate((4.0, 8.0))}, [0, 0]
    )
    assert joint.device_busy_seconds == 6.0


def test_a_store_that_all_share_is_counted_once() -> None:
    shared = SharedStoreStats(is_away=True, failures_total=1, lookups_total=2, look_up_seconds=0.5)
    one = Stats("a", shared_store=DiskStats(5, 500, 1, 2, 3, 0.1, 0.2, None, shared))
    one = msgspec.structs.replace(one, disk=DiskStats(5, 500, 1, 2, 3, 0.1, 0.2, None))
    joint = JointStats(2).add({0: one, 1: one}, [0, 0])
    disk, store = joint.disk, joint.shared_store
    assert disk is not None
    assert (disk.n_pages, disk.n_bytes) == (10, 1000), "each replica has its own folder"
    assert store is not None
    assert (store.n_pages, store.n_bytes, store.pages_written_total) == (5, 500, 4)
    assert store.shared == SharedStoreStats(is_away=True, failures_total=2, lookups_total=4, look_up_seconds=1.0)


GAUGES = set(
    "n_bytes n_duplicate_tokens n_in_slots n_loading n_open n_pages n_pages_evictable n_pages_free "
    "n_pages_pinned n_pauses n_running n_running_slots n_running_tokens n_saved_tokens n_slabs n_slabs_taken "
    "n_slots n_slots_free n_slots_pinned n_spared_tokens n_state_slots n_state_slots_free n_tails n_waiting "
    "n_window_pages n_window_pages_evictable".split()
)
"""Fields whose values at one time are added."""
COUNTERS = {"n_added", "n_cached", "n_copied", "n_fetched", "n_loaded", "n_shared"}
"""Counters without the ending of one, which only ``CacheUse`` and ``SourceStats`` may have."""
NOT_ADDED = set(
    "compute_seconds_per_token fetch_seconds_per_token is_away load_seconds_per_token median_s p90_s "
    "n_adapters n_unloaded page_bytes".split()
)


def test_every_number_says_how_those_of_replicas_become_one() -> None:
    """A new field is added, and as a gauge it falls when a replica dies: name it here if that is right."""
    unknown = {}
    structs: list[Any] = [Stats]
    for struct in structs:
        for one in msgspec.structs.fields(struct):
            kinds = [one.type, *get_args(one.type)]
            kinds += [inner for kind in kinds for inner in get_args(kind)]
            structs += [
                kind
                for kind in kinds
                if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in structs
            ]
            is_counter = one.name.endswith(("_total", "_seconds"))
            allowed = NOT_ADDED | (COUNTERS if struct in (CacheUse, SourceStats) else GAUGES)
            is_number = bool({int, float} & set(kinds)) and struct is not ReplicaStats
            if is_number and not is_counter and one.name not in allowed:
                unknown[one.name] = struct.__name__
    assert unknown.pop("accepted_by_position") == "DraftStats"  # counters too
    assert not unknown


def test_replicas_have_the_same_adapters_with_weights_of_their_own() -> None:
    """And what the cache gave from lower tiers is added, whatever the names of its fields."""
    each = {index: Stats("a", adapters=AdapterStats(2, 100), cache_use=CacheUse(n_loaded=3)) for index in range(2)}
    joint = JointStats(2).add(each, [0, 0])
    assert joint.adapters == AdapterStats(2, 200)
    assert joint.cache_use.n_loaded == 6
