"""Regression tests for bugs that other engines had in their prefix cache."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest

from radixkv.errors import InvariantError
from radixkv.settings.config import EvictionPolicyName
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.node import Namespace, Node
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert

NAMESPACE = Namespace()


@pytest.mark.parametrize(("n_beyond", "last"), [(2, [6, 7]), (3, [3, 4, 5, 6, 7])])
def test_what_is_left_of_a_leaf_is_evicted_with_it_if_it_is_little(n_beyond: int, last: list[int]) -> None:
    tree = RadixTree(1)
    tree.release(insert(tree, ids(*range(3)), range(3)))
    tree.release(insert(tree, ids(*range(100, 105)), range(3, 8)))
    assert [run.pages for run in tree.evict(5, n_beyond=n_beyond)] == [[0, 1, 2], last]
    tree.check()


def test_a_leaf_that_a_quota_keeps_in_part_loses_no_more_than_asked() -> None:
    tree = RadixTree(1)
    tree.release(insert(tree, ids(*range(10)), range(10)))
    assert [run.pages for run in tree.evict(2, {"": 4}, n_beyond=4)] == [[8, 9]]
    tree.check()


def test_an_evicted_prefix_never_matches_its_reused_page() -> None:
    tree = RadixTree(2)
    tree.release(insert(tree, ids(1, 2, 3, 4), [0, 1]))
    tree.evict(1)
    tree.release(insert(tree, ids(1, 2, 5, 6), [0, 1]))
    assert tree.match(NAMESPACE, ids(1, 2, 3, 4)) == 2
    assert tree.match(NAMESPACE, ids(1, 2, 5, 6)) == 4
    assert tree.explain(NAMESPACE, ids(1, 2, 3, 4)).reason == "evicted"


def test_a_deep_tree_raises_no_recursion_error() -> None:
    depth = 5000
    tree = RadixTree(1)
    tokens = ids(*range(depth))
    lease, companion = tree.lease(NAMESPACE, b""), tree.lease(NAMESPACE, b"")
    for page in range(depth):
        token = tokens[4 * page : 4 * page + 4]
        tree.commit(lease, token, [page])
        assert tree.extend(companion, token) == [page]
    tree.mark_computed(lease, depth)
    tree.check()
    fork = tree.fork(lease)
    assert tree.pages(fork) == list(range(depth))
    assert tree.match(NAMESPACE, tokens) == depth
    assert tree.explain(NAMESPACE, tokens + ids(7)).reason == "never_seen"
    assert len(tree.shared_runs([lease, fork])) == 1
    assert tree.detach_uncomputed(lease) == []
    for open_lease in (companion, fork, lease):
        assert tree.release(open_lease) == []
    assert sum(len(run.pages) for run in tree.evict(depth // 2)) == depth // 2
    assert sorted(tree.detach(NAMESPACE)) == list(range(depth // 2))
    assert tree.namespaces() == []
    tree.check()


class CountedInt(int):
    """An integer that counts the comparisons of all its instances."""

    n_compares = 0

    def __lt__(self, other: int) -> bool:
        CountedInt.n_compares += 1
        return int.__lt__(self, other)

    def __gt__(self, other: int) -> bool:
        CountedInt.n_compares += 1
        return int.__gt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedInt.n_compares += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("name", get_args(EvictionPolicyName))
def test_the_cost_of_an_eviction_does_not_grow_with_the_leaves(
    name: EvictionPolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compares(n_leaves: int) -> tuple[int, int]:
        n_digests = 0

        def digest(page: bytes, seed: int) -> int:
            nonlocal n_digests
            n_digests += 1
            return 0

        monkeypatch.setattr("radixkv.tree.digest.xxh3_64_intdigest", digest)

        policy = open_eviction_policy(name, 4.0)
        use = policy.use

        def use_counted(end: Node) -> None:
            use(end)
            end.rank = CountedInt(end.rank)

        monkeypatch.setattr(policy, "use", use_counted)
        tree = RadixTree(1, policy=policy)
        for page in range(n_leaves):
            tree.release(insert(tree, ids(page), [page]))
        CountedInt.n_compares = n_digests = 0
        for _ in range(20):
            assert len(tree.evict(1)) == 1
        return CountedInt.n_compares, n_digests

    few, many = compares(100), compares(5000)
    assert many[0] <= few[0] + 20 * 40
    assert many[1] == few[1]


def test_a_salt_never_equals_an_adapter_of_the_same_name() -> None:
    values = ("", "x", "y")
    namespaces = [Namespace(t, s, a, e) for t in values for s in values for a in values for e in (0, 1)]
    tree = RadixTree(1)
    for page, namespace in enumerate(namespaces):
        assert tree.match(namespace, ids(1)) == 0
        tree.release(insert(tree, ids(1), [page], namespace))
    for page, namespace in enumerate(namespaces):
        assert tree.pages(tree.lease(namespace, ids(1))) == [page]
    tree.check()


def test_colliding_digests_never_return_wrong_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tree.digest.xxh3_64_intdigest", lambda page, seed: 0)
    tree, oracle, random = RadixTree(1), dict[bytes, int](), Random(1)
    for page in range(300):
        tokens = ids(*random.choices(range(3), k=6))
        while oracle and random.random() < 0.3:
            for run in tree.evict(2):
                oracle = {prefix: cached for prefix, cached in oracle.items() if cached not in run.pages}
            break
        known = max(n for n in range(7) if n == 0 or tokens[: 4 * n] in oracle)
        assert tree.match(NAMESPACE, tokens) == known
        lease = insert(tree, tokens, range(1000 + 6 * page, 1006 + 6 * page))
        assert tree.pages(lease)[:known] == [oracle[tokens[: 4 * n]] for n in range(1, known + 1)]
        oracle.update({tokens[: 4 * (n + 1)]: cached for n, cached in enumerate(tree.pages(lease))})
        tree.release(lease)
    tree.check()


def test_second_release_raises() -> None:
    tree = RadixTree(1)
    lease = tree.lease(NAMESPACE, b"")
    tree.release(lease)
    for use in (tree.release, tree.fork, tree.pages, tree.detach_uncomputed):
        with pytest.raises(InvariantError, match="after its release"):
            use(lease)


def test_commit_of_part_of_a_page_raises() -> None:
    tree = RadixTree(2)
    with pytest.raises(InvariantError, match="commit whole pages"):
        tree.commit(tree.lease(NAMESPACE, b""), ids(1), [0])
