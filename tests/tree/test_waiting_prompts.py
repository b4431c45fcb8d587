"""Evictions while prompts wait, after changes of the tree between them that random histories rarely make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert

NAMESPACE = Namespace()
PROMPT = (1, 2, 3)


def cache(tree: RadixTree, *tokens: int, pages: tuple[int, ...] = ()) -> None:
    """Caches a sequence in pages of one token, whose indices are the tokens unless they are given."""
    tree.release(insert(tree, ids(*tokens), pages or tokens))


def cut_and_grow(tree: RadixTree) -> None:
    """The last page is evicted, although it is needed, and another one takes its place."""
    assert [run.pages for run in tree.evict(1, waiting=[(NAMESPACE, ids(*PROMPT))])] == [[3]]
    cache(tree, 1, 2, 9)


def split_and_grow(tree: RadixTree) -> None:
    """The lower part of a split node grows until it is as long as the whole node was."""
    tree.release(tree.lease(NAMESPACE, ids(1)))
    cache(tree, 1, 2, 3, 9)


def leave_and_return(tree: RadixTree) -> None:
    tree.detach(NAMESPACE, ids(1))
    cache(tree, 1, 2, 9)


def leave_while_leased(tree: RadixTree) -> None:
    """The node is detached, but a lease still holds it."""
    tree.lease(NAMESPACE, ids(*PROMPT))
    tree.detach(NAMESPACE, ids(1))
    cache(tree, 1, 2, 9, pages=(11, 12, 9))


def grow(tree: RadixTree) -> None:
    cache(tree, 1, 2, 3, 9)


@pytest.mark.parametrize("change", [cut_and_grow, split_and_grow, leave_and_return, leave_while_leased, grow])
def test_a_match_is_not_used_again_after_a_change(change: Callable[[RadixTree], None]) -> None:
    """Page 9 is not needed, and was used before page 7; so it goes first, alone."""
    tree = RadixTree(1)
    cache(tree, *PROMPT)
    tree.evict(0, waiting=[(NAMESPACE, ids(*PROMPT))])
    change(tree)
    cache(tree, 7)
    n_needed = tree.match(NAMESPACE, ids(*PROMPT))
    pages = [page for run in tree.evict(2, waiting=[(NAMESPACE, ids(*PROMPT))]) for page in run.pages]
    assert pages == [9, 7]
    assert tree.match(NAMESPACE, ids(*PROMPT)) == n_needed
    tree.check()


def test_what_a_prompt_will_find_grows_while_it_waits() -> None:
    tree, waiting = RadixTree(1), [(NAMESPACE, ids(1, 2, 3, 4, 5))]
    for n_cached in (1, 3, 4, 5):
        cache(tree, *range(1, n_cached + 1))
        cache(tree, 7)
        assert [run.pages for run in tree.evict(1, waiting=waiting)] == [[7]]
        tree.check()
    assert [run.pages for run in tree.evict(2, waiting=waiting)] == [[4, 5]]


def test_a_prompt_finds_the_pages_that_come_after_the_cache_was_empty() -> None:
    """An empty namespace loses its root, and gets another one."""
    tree, waiting = RadixTree(1), [(NAMESPACE, ids(*PROMPT))]
    cache(tree, 7)
    assert [run.pages for run in tree.evict(1, waiting=waiting)] == [[7]]
    cache(tree, 1, 2)
    cache(tree, 8)
    assert [run.pages for run in tree.evict(1, waiting=waiting)] == [[8]]
    assert tree.match(*waiting[0]) == 2


def test_a_needed_page_stays_that_need_not_be_freed_now() -> None:
    tree, waiting = RadixTree(1), [(NAMESPACE, ids(1, 2)), (NAMESPACE, ids(1, 2, 3))]
    cache(tree, 1, 2, 3)
    cache(tree, 7)
    assert [run.pages for run in tree.evict(4, waiting=waiting, n_required=2, n_beyond=4)] == [[7], [3]]
    assert tree.evict(4, waiting=waiting, n_required=0) == []
    tree.check()


def test_retained_pages_go_after_those_that_are_needed() -> None:
    """A retention is a promise, a wait is not."""
    tree, waiting = RadixTree(1), [(NAMESPACE, ids(1, 5)), (NAMESPACE, ids(2, 5))]
    for token in (1, 2, 3):
        cache(tree, token)
    for token in (2, 3):
        tree.retentions.add(NAMESPACE, ids(token), until=1.0)
    assert [run.pages for run in tree.evict(3, waiting=waiting)] == [[1], [3], [2]]


def test_what_is_expected_goes_before_what_is_waited_for() -> None:
    tree, waiting, expected = RadixTree(1), [(NAMESPACE, ids(1))], [(NAMESPACE, ids(2)), (NAMESPACE, ids(3))]
    for token in (1, 2, 3, 4):
        cache(tree, token)
    assert [run.pages for run in tree.evict(4, waiting=waiting, expected=expected, n_required=0)] == [[4], [3], [2]]
    assert [run.pages for run in tree.evict(1, waiting=waiting, expected=expected)] == [[1]]
