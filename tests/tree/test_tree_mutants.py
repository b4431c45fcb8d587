"""Mutation test: random histories of ``TreeMachine`` fail for each of these ways to break the tree.

tests/property/README.md lists all mutants of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.errors import InvariantError
from radixkv.tree import evictable, radix_tree
from radixkv.tree.changes import ChangeLog
from radixkv.tree.children import Children
from radixkv.tree.evictable import EvictableLeaves
from radixkv.tree.eviction_policies import LruEviction
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.retention import Retentions
from radixkv.tree.shared_runs import SharedRuns
from radixkv.tree.spared import SparedLeaves
from support.histories import FIRST_FAILURE, run_histories
from support.tree_machine import TreeMachine
from support.tree_mutants import after_each_split

Patch = pytest.MonkeyPatch


def split_loses_the_count(patch: Patch) -> None:
    after_each_split(patch, lambda upper, lower: setattr(upper, "n_leases", 0))


def split_loses_the_rank(patch: Patch) -> None:
    after_each_split(patch, lambda upper, lower: setattr(upper, "rank", 0))


def split_marks_all_as_computed(patch: Patch) -> None:
    after_each_split(patch, lambda upper, lower: setattr(lower, "n_computed", len(lower.pages)))


def leased_leaf_stays_evictable(patch: Patch) -> None:
    def pin(self: Forest, pinned: Any) -> None:
        if not pinned.n_leases:
            self.n_leased += len(pinned.pages)
            self.n_evictable -= len(pinned.pages)
        pinned.n_leases += 1

    patch.setattr(Forest, "add_lease", pin)


def inner_node_is_evictable(patch: Patch) -> None:
    def remove_last_lease(self: Forest, released: Any) -> list[int]:
        freed = original(self, released)
        if released.parent is not None and released.children is not None:
            self.evictable.add(released)
        return freed

    original = Forest.remove_last_lease
    patch.setattr(Forest, "remove_last_lease", remove_last_lease)


def release_removes_no_lease(patch: Patch) -> None:
    def release(self: RadixTree, lease: Lease) -> list[int]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Forest, "remove_lease_of_path", lambda self, end: [])
            return original(self, lease)

    original = RadixTree.release
    patch.setattr(RadixTree, "release", release)


def release_removes_a_lease_twice(patch: Patch) -> None:
    original = Forest.remove_lease_of_path
    patch.setattr(Forest, "remove_lease_of_path", lambda self, end: original(self, end) + original(self, end))


def uses_are_not_ranked(patch: Patch) -> None:
    patch.setattr(LruEviction, "use", lambda self, end: None)


def match_ignores_the_namespace(patch: Patch) -> None:
    original = RadixTree.match
    patch.setattr(RadixTree, "match", lambda self, namespace, tokens: original(self, Namespace(), tokens))


def namespaces_are_ignored(patch: Patch) -> None:
    original = Forest.root
    patch.setattr(Forest, "root", lambda self, namespace: original(self, Namespace()))


def only_the_first_page_is_compared(patch: Patch) -> None:
    def walk(top: Any, tokens: bytes, page_bytes: int) -> Any:
        path, end, partial, n_pages = original(top, tokens, page_bytes)
        if partial is not None:
            n_pages = min(len(partial.key), len(tokens) - end) // page_bytes
        return path, end, partial, n_pages

    def n_matching_bytes(top: Any, tokens: bytes, page_bytes: int) -> int:
        _, end, _, n_pages = walk(top, tokens, page_bytes)
        return end + n_pages * page_bytes

    original = radix_tree.walk
    patch.setattr(radix_tree, "walk", walk)
    patch.setattr(radix_tree, "n_matching_bytes", n_matching_bytes)


def fork_does_not_pin(patch: Patch) -> None:
    def fork(self: RadixTree, lease: Lease) -> Lease:
        second, end = original(self, lease), lease.node
        while end is not None:
            end.n_leases -= 1
            end = end.parent
        return second

    original = RadixTree.fork
    patch.setattr(RadixTree, "fork", fork)


def mark_computed_rounds_up(patch: Patch) -> None:
    original = RadixTree.mark_computed
    patch.setattr(RadixTree, "mark_computed", lambda self, lease, n: original(self, lease, n + 1))


def duplicates_are_lost(patch: Patch) -> None:
    def commit(self: RadixTree, *arguments: Any) -> list[int]:
        original(self, *arguments)
        return []

    original = RadixTree.commit
    patch.setattr(RadixTree, "commit", commit)


def detached_lease_commits(patch: Patch) -> None:
    def commit(self: RadixTree, lease: Lease, tokens: bytes, pages: list[int]) -> list[int]:
        was_detached, lease.node.detached = lease.node.detached, False
        end = lease.node
        canonical = original(self, lease, tokens, pages)
        end.detached = was_detached
        return canonical

    original = RadixTree.commit
    patch.setattr(RadixTree, "commit", commit)


def detach_leaves_pages_that_lead_nowhere(patch: Patch) -> None:
    patch.setattr(radix_tree, "first_without_branch", lambda node: node)


def detach_loses_unleased_pages(patch: Patch) -> None:
    def detach(self: Forest, top: Any) -> list[int]:
        original(self, top)
        return []

    original = Forest.detach
    patch.setattr(Forest, "detach", detach)


def uncomputed_pages_stay_cached(patch: Patch) -> None:
    def remove_last_lease(self: Forest, released: Any) -> list[int]:
        released.n_computed = len(released.pages)
        return original(self, released)

    original = Forest.remove_last_lease
    patch.setattr(Forest, "remove_last_lease", remove_last_lease)


def shared_leaf_grows_in_place(patch: Patch) -> None:
    def append(self: Forest, end: Any, tokens: bytes, pages: list[int], n_hits: int = 0) -> Any:
        if end.parent is None or end.children is not None:
            return original(self, end, tokens, pages, n_hits)
        n_leases, end.n_leases = end.n_leases, 1
        grown = original(self, end, tokens, pages, n_hits)
        end.n_leases = n_leases
        return grown

    original = Forest.append
    patch.setattr(Forest, "append", append)


def computed_page_joins_a_shared_leaf(patch: Patch) -> None:
    def append_computed(self: Forest, end: Any, tokens: bytes, page: int) -> bool:
        n_leases, end.n_leases = end.n_leases, 1
        was_added = original(self, end, tokens, page)
        end.n_leases = n_leases
        return was_added

    original = Forest.append_computed
    patch.setattr(Forest, "append_computed", append_computed)


def computed_page_follows_uncomputed_ones(patch: Patch) -> None:
    def append_computed(self: Forest, end: Any, tokens: bytes, page: int) -> bool:
        n_computed, end.n_computed = end.n_computed, len(end.pages)
        was_added = original(self, end, tokens, page)
        if not was_added:
            end.n_computed = n_computed
        return was_added

    original = Forest.append_computed
    patch.setattr(Forest, "append_computed", append_computed)


def empty_roots_stay(patch: Patch) -> None:
    def remove_last_lease(self: Forest, released: Any) -> list[int]:
        is_root = released.parent is None and not released.detached
        freed = original(self, released)
        if is_root:
            self.roots[released.namespace] = released
        return freed

    original = Forest.remove_last_lease
    patch.setattr(Forest, "remove_last_lease", remove_last_lease)


def eviction_takes_the_newest(patch: Patch) -> None:
    class Newest(evictable.SortedKeyList):
        def __init__(self, key: Callable[[Any], Any]) -> None:
            super().__init__(key=lambda leaf: (-leaf.rank, leaf.serial))

    patch.setattr(evictable, "SortedKeyList", Newest)


def eviction_exceeds_a_quota_by_a_page(patch: Patch) -> None:
    def evict(self: RadixTree, n_pages: int, quotas: Any = None, **settings: Any) -> Any:
        if quotas is not None:
            quotas = {group: quota and quota + 1 for group, quota in quotas.items()}
        return original(self, n_pages, quotas, **settings)

    original = RadixTree.evict
    patch.setattr(RadixTree, "evict", evict)


def waiting_prompts_are_forgotten(patch: Patch) -> None:
    def evict(self: RadixTree, n_pages: int, quotas: Any = None, *, waiting: Any, **settings: Any) -> Any:
        return original(self, n_pages, quotas, **settings)

    original = RadixTree.evict
    patch.setattr(RadixTree, "evict", evict)


def what_is_expected_stays_as_what_is_waited_for(patch: Patch) -> None:
    patch.setattr(SparedLeaves, "is_waited_for", lambda self, leaf: True)


def what_is_waited_for_goes_as_what_is_expected(patch: Patch) -> None:
    patch.setattr(SparedLeaves, "is_waited_for", lambda self, leaf: False)


def what_is_needed_first_goes_with_the_rest(patch: Patch) -> None:
    patch.setattr(SparedLeaves, "n_needed_earlier", lambda self, leaf: 0)


def sparing_never_ends(patch: Patch) -> None:
    patch.setattr(EvictableLeaves, "end_sparing", lambda self, leaf: None)


def retained_leaves_are_evicted_as_others(patch: Patch) -> None:
    def as_if_not_retained(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: EvictableLeaves, leaf: Any) -> None:
            n_retentions, leaf.n_retentions = leaf.n_retentions, 0
            original(self, leaf)
            leaf.n_retentions = n_retentions

        return call

    for name in ("add", "remove"):
        patch.setattr(EvictableLeaves, name, as_if_not_retained(getattr(EvictableLeaves, name)))


def retained_leaf_grows_in_place(patch: Patch) -> None:
    def append(self: Forest, end: Any, tokens: bytes, pages: list[int], n_hits: int = 0) -> Any:
        n_retentions, end.n_retentions = end.n_retentions, 0
        grown = original(self, end, tokens, pages, n_hits)
        end.n_retentions = n_retentions
        if grown is end and n_retentions:
            self.n_retained += len(pages)
            self.retained_pages[end.namespace] += len(pages)
        return grown

    original = Forest.append
    patch.setattr(Forest, "append", append)


def split_loses_the_retentions(patch: Patch) -> None:
    def split(self: Forest, lower: Any, n_pages: int) -> Any:
        upper = original(self, lower, n_pages)
        upper.n_retentions = 0
        return upper

    original = Forest.split
    patch.setattr(Forest, "split", split)


def retained_pages_are_never_let_go(patch: Patch) -> None:
    patch.setattr(Retentions, "remove", lambda self, retention: None)


def version_never_changes(patch: Patch) -> None:
    patch.setattr(RadixTree, "version", property(lambda self: 0))


def shared_runs_are_too_long(patch: Patch) -> None:
    original = SharedRuns.find

    def find(self: SharedRuns, leases: Any) -> Any:
        runs = original(self, leases)
        return [run._replace(n_pages=run.n_pages + 1) for run in runs]

    patch.setattr(SharedRuns, "find", find)


def first_shared_run_is_missing(patch: Patch) -> None:
    original = SharedRuns.find
    patch.setattr(SharedRuns, "find", lambda self, leases: original(self, leases)[1:])


def lease_that_joins_another_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Forest, "n_joins", property(lambda self: 0, lambda self, n: None), raising=False)


def removed_child_is_still_found(patch: Patch) -> None:
    patch.setattr(Children, "remove", lambda self, first_page: None)


def removed_pages_stay_announced(patch: Patch) -> None:
    patch.setattr(ChangeLog, "add_removed", lambda self, node, first, last: None)


def changes_are_told_in_another_order(patch: Patch) -> None:
    original = ChangeLog.take
    patch.setattr(ChangeLog, "take", lambda self: original(self)[::-1])


def pages_are_announced_before_they_are_computed(patch: Patch) -> None:
    def append(self: Forest, end: Any, tokens: bytes, pages: Any, n_hits: int = 0) -> Any:
        last = original(self, end, tokens, pages, n_hits)
        self.changes.add_stored(last, len(last.pages) - len(pages), len(last.pages))
        return last

    original = Forest.append
    patch.setattr(Forest, "append", append)


def uncomputed_pages_are_guesses(patch: Patch) -> None:
    def continue_(end: Any, tail: bytes, n_bytes: int, page_bytes: int) -> bytes:
        for below in [] if end.children is None else end.children.values():
            if below.key.startswith(tail):
                return bytes(below.key[len(tail) : len(tail) + n_bytes])
        return original(end, tail, n_bytes, page_bytes)

    original = radix_tree.continuation
    patch.setattr(radix_tree, "continuation", continue_)


def guesses_end_with_a_page(patch: Patch) -> None:
    def continue_(end: Any, tail: bytes, n_bytes: int, page_bytes: int) -> bytes:
        return original(end, tail, min(n_bytes, page_bytes), page_bytes)

    original = radix_tree.continuation
    patch.setattr(radix_tree, "continuation", continue_)


OF_VERBS = (
    match_ignores_the_namespace,
    duplicates_are_lost,
    release_removes_no_lease,
    fork_does_not_pin,
    waiting_prompts_are_forgotten,
    retained_leaves_are_evicted_as_others,
)
"""Those of public verbs: every change is tested with them."""
OTHERS = (
    split_loses_the_count,
    split_loses_the_rank,
    split_marks_all_as_computed,
    leased_leaf_stays_evictable,
    inner_node_is_evictable,
    release_removes_a_lease_twice,
    uses_are_not_ranked,
    namespaces_are_ignored,
    only_the_first_page_is_compared,
    mark_computed_rounds_up,
    detached_lease_commits,
    detach_leaves_pages_that_lead_nowhere,
    detach_loses_unleased_pages,
    uncomputed_pages_stay_cached,
    shared_leaf_grows_in_place,
    computed_page_joins_a_shared_leaf,
    computed_page_follows_uncomputed_ones,
    empty_roots_stay,
    eviction_takes_the_newest,
    eviction_exceeds_a_quota_by_a_page,
    what_is_needed_first_goes_with_the_rest,
    what_is_expected_stays_as_what_is_waited_for,
    what_is_waited_for_goes_as_what_is_expected,
    sparing_never_ends,
    retained_leaf_grows_in_place,
    split_loses_the_retentions,
    version_never_changes,
    shared_runs_are_too_long,
    first_shared_run_is_missing,
    lease_that_joins_another_is_not_noticed,
    removed_child_is_still_found,
    removed_pages_stay_announced,
    changes_are_told_in_another_order,
    pages_are_announced_before_they_are_computed,
    uncomputed_pages_are_guesses,
    guesses_end_with_a_page,
    retained_pages_are_never_let_go,
)


def run_some_histories() -> None:
    for seed in (1, 2):  # some mutants are found with one of them only
        run_histories(TreeMachine, seed, 2000, 40, phases=FIRST_FAILURE)


@pytest.mark.parametrize("mutant", [*OF_VERBS, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)])
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError, ValueError, IndexError)):
        run_some_histories()
