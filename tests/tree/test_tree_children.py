"""Neighbours of a missing child, compared with a sorted list, and the explanations that use them."""

from random import Random

import pytest

from radixkv.tree.children import Children
from radixkv.tree.explain import Explanation
from radixkv.tree.node import Namespace, Node
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert


@pytest.mark.parametrize("n_children", [3, 600, 3000])
def test_neighbours_agree_with_a_sorted_list(n_children: int) -> None:
    random, children, keys = Random(n_children), Children(), set[bytes]()
    node = Node.__new__(Node)

    def check() -> None:
        assert children.is_ordered()
        page = random.randbytes(4)
        start = page[: random.randrange(3)]
        if page not in keys:
            alike = [key for key in keys if key.startswith(start)]
            below = max((key for key in alike if key < page), default=None)
            above = min((key for key in alike if key > page), default=None)
            assert children.neighbours(page, start) == (below, above)

    for _ in range(n_children):
        key = random.randbytes(4)
        if key not in keys:
            keys.add(key)
            children.add(key, node)
        if random.random() < 0.3:
            key = random.choice(sorted(keys)) if len(keys) < 100 else next(iter(keys))
            keys.remove(key)
            children.remove(key)
            if random.random() < 0.3:
                keys.add(key)
                children.add(key, node)
        if random.random() < 0.05:
            check()
    for key in random.sample(sorted(keys), len(keys)):
        children.remove(key)
        keys.remove(key)
        if random.random() < 0.2:
            check()
    assert children == {}


def test_a_part_of_a_page_is_held_for_the_fewest_tokens_or_more() -> None:
    tree = RadixTree(4)
    insert(tree, ids(1, 2, 3, 4), [0])
    lease = tree.lease(Namespace(), b"")
    for rest in ((), (1,), (1, 9, 9, 9)):
        assert tree.lease_partial_page(lease, ids(*rest), min_tokens=2, max_tokens=4) is None
    partial = tree.lease_partial_page(lease, ids(1, 2), min_tokens=2, max_tokens=4)
    assert (partial.page, partial.n_tokens) == (0, 2)


def test_explain_gives_each_reason() -> None:
    here, there = Namespace(), Namespace(salt="s")
    tree = RadixTree(2)
    for namespace, tokens, pages in (
        (here, ids(1, 2, 5, 6), [0, 1]),
        (here, ids(1, 2, 7, 8), [0, 2]),
        (there, ids(9, 9, 9, 9), [4, 5]),
    ):
        tree.release(insert(tree, tokens, pages, namespace))

    def differs(n_tokens: int, index: int, below: int | None, above: int | None, *tokens: int) -> Explanation:
        return Explanation("differs", n_tokens, index, below, above, ids(*tokens), n_partial=index - n_tokens)

    assert tree.explain(here, ids(1, 2, 5, 6, 7)) == Explanation("whole", 4)
    assert tree.explain(here, ids(1, 2, 5)) == Explanation("whole", 2, common_above=1, n_partial=1)
    assert tree.explain(here, ids(1, 2, 5), contents=False) == Explanation("whole", 2)
    differs_in_the_last_page = Explanation("whole", 2, 2, common_below=0, common_above=0, cached_tokens=ids(7, 8))
    assert tree.explain(here, ids(1, 2, 6)) == differs_in_the_last_page
    assert tree.explain(here, ids(1, 2, 7, 4)) == differs(2, 3, 0, 1, 8)
    assert tree.explain(here, ids(1, 2, 5, 9)) == differs(2, 3, 1, 0, 6)
    assert tree.explain(here, ids(1, 2, 6, 0)) == differs(2, 2, 0, 0, 7, 8)
    assert tree.explain(here, ids(1, 2, 5, 6, 7, 8)) == Explanation("never_seen", 4)
    assert tree.explain(Namespace(tenant="t"), ids(4, 4)) == Explanation("never_seen", 0)
    other = Explanation("other_namespace", 0, 0, 0, None, ids(1, 2), namespace=there, n_tokens_elsewhere=2)
    assert tree.explain(here, ids(9, 9)) == other
    tree.evict(1)
    assert tree.explain(here, ids(1, 2, 5, 6)).reason == "evicted"


def test_explain_reports_evicted_for_a_namespace_with_nothing_cached() -> None:
    here, there = Namespace(salt="mine"), Namespace(salt="hers")
    tree = RadixTree(2)
    tree.release(insert(tree, ids(1, 2, 3, 4), [0, 1], here))
    tree.evict(2)
    assert tree.namespaces() == []
    assert tree.explain(here, ids(1, 2, 3, 4)) == Explanation("evicted", 0)
    assert tree.explain(here, ids(1, 2, 9), contents=False) == Explanation("evicted", 0)
    assert tree.explain(here, ids(9, 2, 3, 4)) == Explanation("never_seen", 0)
    assert tree.explain(there, ids(1, 2, 3, 4)) == Explanation("never_seen", 0)
    assert tree.explain(here, ids(1)) == Explanation("whole", 0)


def test_explain_without_contents_reveals_whole_pages_only() -> None:
    """A client must not be able to guess a cached page token by token, or from the cache of another namespace."""

    here = Namespace()

    def tree_of(*cached: tuple[Namespace, bytes]) -> RadixTree:
        tree = RadixTree(4)
        for index, (namespace, tokens) in enumerate(cached):
            tree.release(insert(tree, tokens, [2 * index, 2 * index + 1], namespace))
        return tree

    secrets = [(1, 2, 3, 4, *rest) for rest in ((5, 6, 7, 8), (5, 6, 7, 9), (10, 11, 12, 13))]
    probe = ids(1, 2, 3, 4, 5, 6, 7, 20)
    full = {tree_of((here, ids(*secret))).explain(here, probe) for secret in secrets}
    brief = {tree_of((here, ids(*secret))).explain(here, probe, contents=False) for secret in secrets}
    assert len(full) == 3
    assert brief == {Explanation("differs", 4)}

    foreign = tree_of((Namespace(salt="hers"), ids(*secrets[0])))
    assert foreign.explain(here, ids(*secrets[0]), contents=False) == Explanation("never_seen", 0)
    foreign.evict(1)
    assert foreign.explain(here, ids(*secrets[0]), contents=False) == Explanation("never_seen", 0)
    whole = tree_of((here, ids(*secrets[0])))
    assert whole.explain(here, ids(*secrets[0]), contents=False) == Explanation("whole", 8)
    whole.evict(1)
    assert whole.explain(here, ids(*secrets[0]), contents=False) == Explanation("evicted", 4)
