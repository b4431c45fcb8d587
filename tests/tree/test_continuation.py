"""How cached sequences go on after a request's tokens, and which one it is of several."""

from __future__ import annotations

import pytest

from radixkv.errors import InvariantError
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert

NAMESPACE = Namespace()


def test_it_goes_on_across_nodes_and_within_a_page() -> None:
    tree = RadixTree(2)
    tree.release(insert(tree, ids(1, 2, 3, 4, 5, 6), range(3)))
    tree.release(insert(tree, ids(1, 2, 7, 8), range(3, 5)))
    lease = tree.lease(NAMESPACE, ids(1, 2))
    assert tree.continuation(lease, ids(3), 9) == ids(4, 5, 6)
    assert tree.continuation(lease, ids(3, 4, 5), 9) == ids(6)
    assert tree.continuation(lease, ids(3, 4), 1) == ids(5)
    assert tree.continuation(lease, ids(3, 4, 5, 6), 9) == b""
    for tail in (ids(9), ids(3, 5), ids(3, 4, 9), ids(3, 4, 5, 6, 7)):
        assert tree.continuation(lease, tail, 9) == b""


def test_of_several_sequences_it_is_the_one_that_was_used_last() -> None:
    tree = RadixTree(2)
    first, second = ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 5, 7, 8)
    tree.release(insert(tree, first, range(3)))
    tree.release(insert(tree, second, range(3, 6)))
    lease = tree.lease(NAMESPACE, ids(1, 2))
    assert tree.continuation(lease, ids(3), 3) == ids(5, 7, 8)
    assert tree.continuation(lease, b"", 4) == ids(3, 5, 7, 8)
    tree.release(tree.lease(NAMESPACE, first))
    assert tree.continuation(lease, ids(3), 3) == ids(4, 5, 6)


def test_it_neither_leaves_the_namespace_nor_shows_what_is_not_computed() -> None:
    tree = RadixTree(1)
    tree.release(insert(tree, ids(1, 2, 3), range(3), Namespace(salt="a")))
    running = tree.lease(NAMESPACE, ids(1))
    tree.commit(running, ids(1, 2, 3), range(3, 6))
    lease = tree.lease(NAMESPACE, b"")
    assert tree.continuation(lease, ids(1), 9) == b""
    tree.mark_computed(running, 2)
    assert tree.continuation(lease, ids(1), 9) == ids(2)
    other = tree.lease(Namespace(salt="b"), b"")
    assert tree.continuation(other, ids(1), 9) == b""


def test_what_is_being_computed_hides_nothing_that_is_computed() -> None:
    tree = RadixTree(2)
    tree.release(insert(tree, ids(1, 2, 3, 4), range(2)))
    running = tree.lease(NAMESPACE, ids(1, 2))
    tree.release(tree.lease(NAMESPACE, ids(1, 2)))
    tree.commit(running, ids(3, 5), [2])
    lease = tree.lease(NAMESPACE, ids(1, 2))
    assert tree.continuation(lease, ids(3), 9) == ids(4)


def test_a_detached_lease_has_none_and_a_released_one_is_an_error() -> None:
    tree = RadixTree(1)
    tree.release(insert(tree, ids(1, 2, 3), range(3)))
    lease = tree.lease(NAMESPACE, ids(1))
    tree.detach(NAMESPACE)
    tree.release(insert(tree, ids(1, 2, 3), range(3, 6)))
    assert tree.continuation(lease, b"", 9) == b""
    tree.release(lease)
    with pytest.raises(InvariantError, match="after its release"):
        tree.continuation(lease, b"", 9)


def test_it_is_no_use_of_what_it_finds() -> None:
    tree = RadixTree(1)
    tree.release(insert(tree, ids(1, 2), range(2)))
    tree.release(insert(tree, ids(3, 4), range(2, 4)))
    lease = tree.lease(NAMESPACE, b"")
    assert tree.continuation(lease, ids(1), 9) == ids(2)
    assert [run.pages for run in tree.evict(2)] == [[0, 1]]
