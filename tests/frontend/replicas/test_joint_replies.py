"""The replies of several replicas as one."""

from __future__ import annotations

from radixkv.frontend.replicas.joint_replies import best_match, joint_outline, sum_counts
from radixkv.wire.cache_messages import Invalidated, Matched, Outlined, TierMatch, TierOutline, TreeNode


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

    joint = joint_outline({0: Outlined("a", outline(-1, 0, 1)), 2: Outlined("b", outline(-1, 0))}, 3).device
    assert [node.parent for node in joint.nodes] == [-1, 0, 1, -1, 3]
    assert [node.serial for node in joint.nodes] == [0, 3, 6, 2, 5]
    assert [node.replica for node in joint.nodes] == [0, None, None, 2, None], "those of the roots"
    assert (joint.n_pages, joint.n_not_visited) == (5, 2)
