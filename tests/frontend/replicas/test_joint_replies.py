"""The replies of several replicas as one."""

from __future__ import annotations

import msgspec

from radixkv.frontend.replicas.joint_replies import best_match, joint_outline, sum_counts, sum_stats
from radixkv.wire.cache_messages import Invalidated, Matched, Outlined, TierMatch, TierOutline, TreeNode
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.stats import DraftStats, HostStats, ReplicaStats, SourceStats, Stats, TenantStats


def host(value: int) -> HostStats:
    return HostStats(*(value for _ in range(11)), float(value) if value else None, 2.0 * value, value)


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
    joint = sum_stats({0: stats(1), 1: stats(3)}, [0, 2])
    assert (joint.n_running, joint.n_pages, joint.prefix_queries_total, joint.step_seconds) == (4, 40, 28, 2.0)
    assert joint.cache_use == CacheUse(20, 4)
    assert joint.drafts is not None
    assert joint.drafts.by_source == {"tree": SourceStats(4, 0)}
    assert joint.drafts.accepted_by_position == (4, 2)
    assert joint.tenants == {"a": TenantStats(4, 0, 6), "b1": TenantStats(1, 1, 1), "b3": TenantStats(1, 1, 1)}
    assert joint.disk is None


def test_sizes_and_rates_are_not_added() -> None:
    joint = sum_stats({0: stats(1), 1: stats(3)}, [0, 0])
    assert joint.start_seconds == {"imports": 3.0, "only 1": 1.0, "only 3": 1.0}
    assert joint.host is not None
    assert joint.host.page_bytes == 3
    assert joint.host.load_seconds_per_token == 2.0
    assert joint.host.n_slots == 4


def test_each_replica_is_shown_those_that_are_down_too() -> None:
    joint = sum_stats({1: stats(3)}, [4, 2])
    down, up = joint.replicas["0"], joint.replicas["1"]
    assert down == ReplicaStats(is_up=False, n_restarts=4)
    assert (up.is_up, up.n_restarts, up.n_running, up.n_pages, up.prefix_hits_total) == (True, 2, 3, 30, 15)
    assert msgspec.structs.replace(joint, replicas={}) == stats(3)


def test_counts_of_pages_are_added_and_absent_tiers_stay_absent() -> None:
    joint = sum_counts([Invalidated("a", 1, 2, 3), Invalidated("b", 10, 20, 30)])
    assert joint == Invalidated("a", 11, 22, 33, None)


def test_a_prompt_has_the_match_of_the_replica_that_has_most_of_it() -> None:
    few, many = TierMatch(100, 16, 0, 0), TierMatch(100, 0, 32, 16)
    joint = best_match([Matched("a", (few, many), 1, 2, 3, None), Matched("b", (many, few), 10, 20, 30, None)])
    assert joint == Matched("a", (many, many), 11, 22, 33, None)


def test_trees_stand_beside_each_other() -> None:
    def outline(*parents: int) -> TierOutline:
        nodes = tuple(TreeNode(index, parent, 1, 1, 0, 0, 0, False) for index, parent in enumerate(parents))
        return TierOutline(nodes, len(nodes), 1, 0, 0)

    joint = joint_outline([Outlined("a", outline(-1, 0, 1)), Outlined("b", outline(-1, 0))]).device
    assert [node.parent for node in joint.nodes] == [-1, 0, 1, -1, 3]
    assert len({node.serial for node in joint.nodes}) == 5
    assert (joint.n_pages, joint.n_not_visited) == (5, 2)
