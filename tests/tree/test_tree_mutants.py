"""Each of these ways to break the tree turns the script red; else the script proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.errors import InvariantError
from radixkv.tree import forest, node, radix_tree
from radixkv.tree.children import Children
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree
from support.tree_world import run_script

Patch = pytest.MonkeyPatch


def split_loses_the_count(patch: Patch) -> None:
    def split(self: Forest, lower: Any, n_pages: int) -> Any:
        upper = original(self, lower, n_pages)
        upper.n_leases = 0
        return upper

    original = Forest.split
    patch.setattr(Forest, "split", split)


def split_loses_the_tick(patch: Patch) -> None:
    def split(self: Forest, lower: Any, n_pages: int) -> Any:
        upper = original(self, lower, n_pages)
        upper.tick = 0
        return upper

    original = Forest.split
    patch.setattr(Forest, "split", split)


def split_settles_all(patch: Patch) -> None:
    def split(self: Forest, lower: Any, n_pages: int) -> Any:
        upper = original(self, lower, n_pages)
        lower.n_computed = len(lower.pages)
        return upper

    original = Forest.split
    patch.setattr(Forest, "split", split)


def leased_leaf_stays_evictable(patch: Patch) -> None:
    def pin(self: Forest, pinned: Any) -> None:
        if not pinned.n_leases:
            self.n_leased += len(pinned.pages)
            self.n_evictable -= len(pinned.pages)
        pinned.n_leases += 1

    patch.setattr(Forest, "pin", pin)


def inner_node_is_evictable(patch: Patch) -> None:
    def offer(self: Forest, offered: Any) -> None:
        if offered.parent is None:
            original(self, offered)
        else:
            self.evictable.add(offered)

    original = Forest._offer
    patch.setattr(Forest, "_offer", offer)


def release_does_not_unpin(patch: Patch) -> None:
    def release(self: RadixTree, lease: Lease) -> list[int]:
        lease.released = True
        self._leases.remove(lease)
        return []

    patch.setattr(RadixTree, "release", release)


def release_unpins_twice(patch: Patch) -> None:
    def release(self: RadixTree, lease: Lease) -> list[int]:
        freed = original(self, self.fork(lease))
        return freed + original(self, lease) + self._forest.unpin(lease.node)

    original = RadixTree.release
    patch.setattr(RadixTree, "release", release)


def release_does_not_touch(patch: Patch) -> None:
    patch.setattr(Forest, "tick", lambda self: 1)


def namespace_is_ignored(patch: Patch) -> None:
    original = Forest.root
    patch.setattr(Forest, "root", lambda self, namespace: original(self, Namespace()))


def only_the_first_page_is_compared(patch: Patch) -> None:
    def common(key: bytes, tokens: bytes, start: int, width: int) -> int:
        return min(len(key), len(tokens) - start) // width

    patch.setattr(node, "_common_pages", common)


def fork_does_not_pin(patch: Patch) -> None:
    def fork(self: RadixTree, lease: Lease) -> Lease:
        second = Lease(lease.node, lease.n_tokens)
        self._leases.add(second)
        return second

    patch.setattr(RadixTree, "fork", fork)


def settle_rounds_up(patch: Patch) -> None:
    original = RadixTree.mark_computed
    patch.setattr(RadixTree, "mark_computed", lambda self, lease, n: original(self, lease, n + self._page_size))


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
        done = original(self, lease, tokens, pages)
        end.detached = was_detached
        return done

    original = RadixTree.commit
    patch.setattr(RadixTree, "commit", commit)


def detach_loses_unleased_pages(patch: Patch) -> None:
    def detach(self: Forest, top: Any) -> list[int]:
        original(self, top)
        return []

    original = Forest.detach
    patch.setattr(Forest, "detach", detach)


def unsettled_pages_stay_cached(patch: Patch) -> None:
    def unpin(self: Forest, unpinned: Any) -> list[int]:
        unpinned.n_computed = len(unpinned.pages)
        return original(self, unpinned)

    original = Forest.unpin
    patch.setattr(Forest, "unpin", unpin)


def shared_leaf_grows_in_place(patch: Patch) -> None:
    def append(self: Forest, end: Any, tokens: bytes, pages: list[int]) -> Any:
        if end.parent is None or end.children is not None:
            return original(self, end, tokens, pages)
        n_leases, end.n_leases = end.n_leases, 1
        grown = original(self, end, tokens, pages)
        end.n_leases = n_leases
        return grown

    original = Forest.append
    patch.setattr(Forest, "append", append)


def empty_roots_stay(patch: Patch) -> None:
    def offer(self: Forest, offered: Any) -> None:
        if offered.parent is not None:
            original(self, offered)

    original = Forest._offer
    patch.setattr(Forest, "_offer", offer)


def eviction_takes_the_newest(patch: Patch) -> None:
    class Newest(forest.SortedKeyList):
        def __init__(self, key: Callable[[Any], Any]) -> None:
            super().__init__(key=lambda leaf: (-leaf.tick, leaf.serial))

    patch.setattr(forest, "SortedKeyList", Newest)


def version_stands_still(patch: Patch) -> None:
    patch.setattr(RadixTree, "version", property(lambda self: 0))


def shared_runs_are_too_long(patch: Patch) -> None:
    original = radix_tree.find_shared_runs

    def find(leases: Any) -> Any:
        runs = original(leases)
        return [run._replace(n_pages=run.n_pages + 1) for run in runs]

    patch.setattr(radix_tree, "find_shared_runs", find)


def shared_runs_of_some_leases_are_left_out(patch: Patch) -> None:
    original = radix_tree.find_shared_runs
    patch.setattr(radix_tree, "find_shared_runs", lambda leases: original(leases)[1:])


def removed_child_is_still_found(patch: Patch) -> None:
    patch.setattr(Children, "remove", lambda self, first_page: None)


def run_scripts() -> None:
    for seed in range(4):
        run_script(seed, 400, 2)


def test_scripts_are_green_without_a_mutant() -> None:
    run_scripts()


@pytest.mark.parametrize(
    "mutant",
    [
        split_loses_the_count,
        split_loses_the_tick,
        split_settles_all,
        leased_leaf_stays_evictable,
        inner_node_is_evictable,
        release_does_not_unpin,
        release_unpins_twice,
        release_does_not_touch,
        namespace_is_ignored,
        only_the_first_page_is_compared,
        fork_does_not_pin,
        settle_rounds_up,
        duplicates_are_lost,
        detached_lease_commits,
        detach_loses_unleased_pages,
        unsettled_pages_stay_cached,
        shared_leaf_grows_in_place,
        empty_roots_stay,
        eviction_takes_the_newest,
        version_stands_still,
        shared_runs_are_too_long,
        shared_runs_of_some_leases_are_left_out,
        removed_child_is_still_found,
    ],
)
def test_mutant_turns_the_script_red(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError, ValueError, IndexError)):
        run_scripts()
