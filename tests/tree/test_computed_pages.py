"""Tests of ``RadixTree.commit_computed_page``; ``TreeMachine`` compares all that it does with its model."""

from __future__ import annotations

import pytest

from radixkv.errors import InvariantError
from radixkv.tree.eviction_policies import AdaptiveEviction, LfudaEviction
from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert


def prompt(tree: RadixTree, *tokens: int) -> Lease:
    """Caches a prompt, a token a page, as computed pages with the numbers of the tokens."""
    return insert(tree, ids(*tokens), tokens)


def test_pages_of_an_answer_enter_the_tree_at_once() -> None:
    tree = RadixTree(1)
    lease = prompt(tree, 1, 2)
    versions = [tree.version]
    for token in (3, 4):
        assert tree.commit_computed_page(lease, ids(token), token)
        versions.append(tree.version)
    assert len(set(versions)) == 3
    assert tree.pages(lease) == [1, 2, 3, 4]
    assert tree.n_computed(lease) == tree.match(Namespace(), ids(1, 2, 3, 4, 5)) == 4
    tree.check()
    assert tree.release(lease) == []
    assert tree.n_pages_evictable == 4


def test_a_page_that_others_may_have_or_that_follows_uncomputed_ones_takes_two_calls() -> None:
    tree = RadixTree(1)
    empty = tree.lease(Namespace(), b"")
    assert not tree.commit_computed_page(empty, ids(9), 9)
    lease = prompt(tree, 1, 2)
    fork = tree.fork(lease)
    assert not tree.commit_computed_page(lease, ids(3), 3)
    tree.commit(fork, ids(3, 4), [3, 4])
    assert not tree.commit_computed_page(lease, ids(3), 5)
    assert not tree.commit_computed_page(fork, ids(5), 5)
    tree.mark_computed(fork, 4)
    tree.detach(Namespace())
    assert not tree.commit_computed_page(fork, ids(5), 5)
    assert [tree.pages(one) for one in (empty, lease, fork)] == [[], [1, 2], [1, 2, 3, 4]]
    tree.check()


def test_a_policy_that_remembers_pages_is_asked_for_their_hits() -> None:
    tree = RadixTree(1, policy=AdaptiveEviction(1.0))
    assert not tree.commit_computed_page(prompt(tree, 1, 2), ids(3), 3)


def test_a_page_after_pages_with_hits_has_none() -> None:
    tree = RadixTree(1, policy=LfudaEviction())
    tree.release(prompt(tree, 1, 2))
    again = tree.lease(Namespace(), ids(1, 2))
    assert not tree.commit_computed_page(again, ids(3), 3)
    tree.commit(again, ids(3), [3])
    assert again.node.n_hits == 0


def test_a_page_without_all_its_tokens_and_a_released_lease_are_refused() -> None:
    tree = RadixTree(1)
    lease = prompt(tree, 1, 2)
    assert not tree.commit_computed_page(lease, ids(), 3)
    tree.release(lease)
    with pytest.raises(InvariantError, match="after its release"):
        tree.commit_computed_page(lease, ids(3), 3)
