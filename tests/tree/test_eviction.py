"""Eviction policies beside naive models of them, on traffic that comes back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, get_args

import pytest

from radixkv.runtime.cache.cache import PageCache
from radixkv.settings.config import EvictionPolicyName
from radixkv.tree.eviction_policies import (
    AdaptiveEviction,
    EvictionPolicy,
    LfudaEviction,
    LruEviction,
    open_eviction_policy,
)
from radixkv.tree.forest import Forest
from radixkv.tree.node import Namespace, Node
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.reuse_rates import ReuseRates
from support.tree_mutants import after_each_split
from support.tree_world import World
from support.trees import ids, insert

Patch = pytest.MonkeyPatch
POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)
NAMESPACE = Namespace()
N_CACHED = 24


def replay(policy: EvictionPolicyName, seed: int, n_requests: int = 150) -> None:
    """Replays chats of one to six turns, some of them at once; ``World`` compares each step with the model."""
    random, world, chats = Random(seed), World(1, policy), dict[int, bytes]()
    for n in range(n_requests):
        chat = random.choice([n, *list(chats)[-random.choice((3, 12)) :]])
        turn = ids(*(random.randrange(3) for _ in range(random.randrange(1, 4))))
        chats[chat] = tokens = (chats.get(chat, ids(1, chat % 5)) + turn)[: 4 * 12]
        tracked = world.lease(NAMESPACE, tokens, is_hit=random.random() < 0.5)
        if not tracked.is_hit and random.random() < 0.8:
            world.count_hit(tracked)
        world.commit(tracked, tokens[len(tracked.tokens) :])
        world.mark_computed(tracked, len(tracked.tokens) // 4)
        while len(world.leases) > random.choice((0, 0, 1, 2)):
            world.release(world.leases[0])
        if random.random() < 0.1:
            world.lease(NAMESPACE, random.choice(list(chats.values())), is_use=False)
        if random.random() < 0.1:
            world.demote(NAMESPACE, chats[random.choice(list(chats))], random.randrange(4))
        world.evict(max(0, world.tree.n_pages_reachable - N_CACHED))
        world.check()


def replay_all(policy: EvictionPolicyName, seeds: range = range(8)) -> None:
    for seed in seeds:
        replay(policy, seed)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 8), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_evicts_what_its_model_does(policy: EvictionPolicyName, seeds: range) -> None:
    replay_all(policy, seeds)


def uses_are_not_ranked(patch: Patch) -> None:
    patch.setattr(LruEviction, "use", lambda self, end: None)


def hits_are_not_counted(patch: Patch) -> None:
    patch.setattr(LfudaEviction, "hit", lambda self, nodes: None)


def the_age_stands_still(patch: Patch) -> None:
    patch.setattr(LfudaEviction, "victim", lambda self, leaves: 0)


def hits_of_evicted_pages_are_forgotten(patch: Patch) -> None:
    patch.setattr(AdaptiveEviction, "recall", lambda self, digests: [0] * len(digests))


def the_first_class_is_always_evicted(patch: Patch) -> None:
    patch.setattr(AdaptiveEviction, "victim", lambda self, leaves: 0)


def all_evicted_pages_are_remembered(patch: Patch) -> None:
    original = AdaptiveEviction.__init__
    patch.setattr(AdaptiveEviction, "__init__", lambda self, ghost_capacity: original(self, 1e9))


def an_abandoned_page_counts_as_used(patch: Patch) -> None:
    def add(self: ReuseRates, group: int, age: int, n_pages: int, *, were_used: bool) -> None:
        original(self, group, age, n_pages, were_used=True)

    original = ReuseRates.add
    patch.setattr(ReuseRates, "add", add)


def split_loses_the_hits(patch: Patch) -> None:
    after_each_split(patch, lambda upper, lower: setattr(upper, "n_hits", 0))


def always_lease(patch: Patch, **kind: bool) -> None:
    """Makes all leases uses or hits."""
    lease = RadixTree.lease
    patch.setattr(RadixTree, "lease", lambda self, *arguments, **given: lease(self, *arguments, **(given | kind)))


def copies_count_as_hits(patch: Patch) -> None:
    always_lease(patch, is_hit=True)


def demoted_pages_stay(patch: Patch) -> None:
    patch.setattr(Forest, "demote", lambda self, node: None)


def copies_count_as_uses(patch: Patch) -> None:
    always_lease(patch, is_use=True)


def demoted_pages_are_remembered(patch: Patch) -> None:
    def remember(self: AdaptiveEviction, leaf: Node, digests: Any, n_cached: int) -> None:
        rank, leaf.rank = leaf.rank, abs(leaf.rank)
        original(self, leaf, digests, n_cached)
        leaf.rank = rank

    original = AdaptiveEviction.remember
    patch.setattr(AdaptiveEviction, "remember", remember)


def new_pages_join_those_that_were_hit(patch: Patch) -> None:
    def append(self: Forest, node: Node, tokens: bytes, pages: list[int], n_hits: int = 0) -> Node:
        return original(self, node, tokens, pages, node.n_hits)

    original = Forest.append
    patch.setattr(Forest, "append", append)


MUTANTS: tuple[tuple[Callable[[Patch], None], EvictionPolicyName], ...] = (
    (uses_are_not_ranked, "lru"),
    (hits_are_not_counted, "lfuda"),
    (the_age_stands_still, "lfuda"),
    (hits_of_evicted_pages_are_forgotten, "adaptive"),
    (the_first_class_is_always_evicted, "adaptive"),
    (all_evicted_pages_are_remembered, "adaptive"),
    (an_abandoned_page_counts_as_used, "adaptive"),
    (split_loses_the_hits, "lfuda"),
    (copies_count_as_hits, "lfuda"),
    (copies_count_as_uses, "lru"),
    (demoted_pages_stay, "lru"),
    (demoted_pages_stay, "adaptive"),
    (demoted_pages_are_remembered, "adaptive"),
    (new_pages_join_those_that_were_hit, "lfuda"),
)


@pytest.mark.parametrize(("mutant", "policy"), MUTANTS)
def test_a_mutant_of_a_policy_is_found(
    mutant: Callable[[Patch], None], policy: EvictionPolicyName, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        replay_all(policy)


class FixedRanks(EvictionPolicy):
    """Ranks each path by what the test says."""

    def __init__(self) -> None:
        self.rank = 0

    def use(self, end: Node) -> None:
        while end.parent is not None:
            end.rank, end = self.rank, end.parent


def test_the_smallest_rank_is_evicted_first() -> None:
    policy = FixedRanks()
    cache = PageCache(8, 1, policy=policy)
    ranks = [5, 3, 7, 0, 2, 6, 4, 1]
    for page, policy.rank in enumerate(ranks):
        blocks = cache.open(NAMESPACE, ids(page))
        assert cache.reserve(blocks, 1)
        cache.commit(blocks, bytearray(ids(page)), 1, last_step=-1)
        cache.mark_computed(blocks, 1, step=0)
        cache.close(blocks)
    cache.tree.check()
    evicted = [int.from_bytes(run.tokens, "little") for _ in ranks for run in cache.tree.evict(1)]
    assert [ranks[token] for token in evicted] == sorted(ranks)


def test_pages_that_return_outlive_a_scan() -> None:
    """Prompts that never return evict a chat before its next turn under ``lru``, and not under ``adaptive``."""
    cached = {}
    for name in ("lru", "adaptive"):
        tree, chat, page = RadixTree(1, policy=open_eviction_policy(name, 4.0)), ids(1, 2, 3), iter(range(10**6))
        n_found = 0
        for n in range(600):
            for tokens in [chat] * (n % 15 == 0) + [ids(10 + n, 1, 1)]:
                n_found += tree.match(NAMESPACE, tokens)
                tree.release(insert(tree, tokens, [next(page) for _ in range(3)]))
                tree.evict(max(0, tree.n_pages_reachable - 30))
        cached[name] = n_found
    assert cached["lru"] == 0
    assert cached["adaptive"] >= 3 * 25
