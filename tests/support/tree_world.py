"""A tree beside a model of it that is too simple to be wrong: a dict from every cached prefix to its page."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, takewhile
from random import Random
from struct import pack

from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree

NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"), Namespace(epoch=1))
N_PAGES = 64

Prefix = tuple[Namespace, bytes]


@dataclass(eq=False)
class Held:
    """An open lease, and what the model says it covers."""

    lease: Lease
    namespace: Namespace
    tokens: bytes
    pages: list[int]
    detached_from: int | None = None
    """First page of the path that cannot be reached any more."""


@dataclass
class World:
    """Every verb applied to both, and compared."""

    page_size: int
    tree: RadixTree = field(init=False)
    free: list[int] = field(default_factory=lambda: list(range(N_PAGES)))
    cached: dict[Prefix, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    used_at: dict[int, int] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    clock: int = 0

    def __post_init__(self) -> None:
        self.tree = RadixTree(self.page_size)

    @property
    def width(self) -> int:
        return 4 * self.page_size

    def expected_match(self, namespace: Namespace, tokens: bytes) -> int:
        n = 0
        while (n + 1) * self.width <= len(tokens) and (namespace, tokens[: (n + 1) * self.width]) in self.cached:
            n += 1
        return n

    def path_pages(self, namespace: Namespace, tokens: bytes) -> list[int]:
        return [self.cached[namespace, tokens[:end]] for end in range(self.width, len(tokens) + 1, self.width)]

    def match(self, namespace: Namespace, tokens: bytes) -> None:
        n = self.expected_match(namespace, tokens)
        assert self.tree.match(namespace, tokens) == n * self.page_size
        explanation = self.tree.explain(namespace, tokens)
        assert explanation.n_tokens == n * self.page_size
        assert (explanation.reason == "whole") == (n == len(tokens) // self.width)
        if explanation.reason == "other_namespace":
            assert explanation.namespace is not None
            assert self.expected_match(explanation.namespace, tokens) > n
        if explanation.reason == "never_seen":
            matched = tokens[: n * self.width]
            assert not any(ns == namespace and p.startswith(matched) and p != matched for ns, p in self.cached)

    def lease(self, namespace: Namespace, tokens: bytes) -> Held:
        n = self.expected_match(namespace, tokens)
        covered = tokens[: n * self.width]
        held = Held(self.tree.lease(namespace, tokens), namespace, covered, self.path_pages(namespace, covered))
        assert held.lease.n_tokens == n * self.page_size
        self.held.append(held)
        self._touch(held)
        return held

    def commit(self, held: Held, tokens: bytes) -> None:
        tokens = tokens[: min(len(tokens) // self.width, len(self.free)) * self.width]
        pages = [self.free.pop() for _ in range(len(tokens) // self.width)]
        canonical = self.tree.commit(held.lease, tokens, pages)
        if held.detached_from is not None:
            assert canonical == []
            assert held.lease.n_tokens == len(held.tokens) // 4
            self.free += pages
            return
        n_known = self.expected_match(held.namespace, held.tokens + tokens) - len(held.pages)
        whole = held.tokens + tokens
        known = self.path_pages(held.namespace, whole[: len(held.tokens) + n_known * self.width])
        assert canonical == known[len(held.pages) :]
        assert held.lease.n_tokens == len(whole) // 4
        self.free += pages[:n_known]
        for index in range(n_known, len(pages)):
            self.cached[held.namespace, whole[: len(held.tokens) + (index + 1) * self.width]] = pages[index]
            self.used_at[pages[index]] = 0
        held.tokens = whole
        held.pages += canonical + pages[n_known:]

    def extend(self, held: Held, tokens: bytes) -> None:
        gained = self.tree.extend(held.lease, tokens)
        if held.detached_from is not None:
            assert gained == []
            return
        n = self.expected_match(held.namespace, held.tokens + tokens)
        held.tokens = (held.tokens + tokens)[: n * self.width]
        pages = self.path_pages(held.namespace, held.tokens)
        assert gained == pages[len(held.pages) :]
        held.pages = pages

    def fork(self, held: Held) -> None:
        second = self.tree.fork(held.lease)
        self.held.append(Held(second, held.namespace, held.tokens, list(held.pages), held.detached_from))

    def release(self, held: Held) -> None:
        self.held.remove(held)
        self._touch(held)
        kept = {page for other in self.held for page in other.pages}
        first_detached = len(held.pages) if held.detached_from is None else held.detached_from
        expected = [
            page
            for index, page in enumerate(held.pages)
            if page not in kept and (index >= first_detached or page not in self.settled)
        ]
        freed = self.tree.release(held.lease)
        assert sorted(freed) == sorted(expected)
        self.cached = {prefix: page for prefix, page in self.cached.items() if page not in expected}
        self._give_back(freed)

    def mark_computed(self, held: Held, n_tokens: int) -> None:
        self.tree.mark_computed(held.lease, n_tokens)
        self.settled.update(held.pages[: n_tokens // self.page_size])

    def detach_uncomputed(self, held: Held) -> None:
        freed = self.tree.detach_uncomputed(held.lease)
        unsettled = [index for index, page in enumerate(held.pages) if page not in self.settled]
        if unsettled and (held.detached_from is None or unsettled[0] < held.detached_from):
            end = (unsettled[0] + 1) * self.width
            top = held.tokens[:end]
            self._forget(freed, lambda prefix: prefix[0] == held.namespace and prefix[1].startswith(top))
        else:
            assert freed == []

    def detach(self, namespace: Namespace, tokens: bytes) -> None:
        stem = tokens[: len(tokens) // self.width * self.width]
        freed = self.tree.detach(namespace, tokens)
        self._forget(freed, lambda p: p[0] == namespace and p[1].startswith(stem) and len(p[1]) > len(stem))
        if not stem:
            for held in self.held:
                if held.namespace == namespace and held.detached_from is None:
                    held.detached_from = len(held.pages)

    def evict(self, n_pages: int) -> None:
        n_evictable = self.tree.n_pages_evictable
        runs = self.tree.evict(n_pages)
        assert sum(len(run.pages) for run in runs) == min(n_pages, n_evictable)
        kept = {page for held in self.held for page in held.pages}
        prefix_of = {page: prefix for prefix, page in self.cached.items()}
        for run in runs:
            namespace, last = prefix_of[run.pages[-1]]
            assert run.namespace == namespace
            assert last.endswith(run.tokens)
            assert len(run.tokens) == self.width * len(run.pages)
            inner = {(ns, tokens[: -self.width]) for ns, tokens in self.cached}
            leaves = [page for prefix, page in self.cached.items() if prefix not in inner and page not in kept]
            assert self.used_at[run.pages[-1]] == min(self.used_at[page] for page in leaves)
            for page in reversed(run.pages):
                prefix = prefix_of[page]
                assert page not in kept
                assert not any(ns == prefix[0] and t[: -self.width] == prefix[1] for ns, t in self.cached)
                del self.cached[prefix]
            self._give_back(run.pages)

    def check(self) -> None:
        """Both agree, and every page is in exactly one place."""
        self.tree.check()
        self.tree.check(deep=False)
        reachable, detached = list(self.tree.reachable_pages()), list(self.tree.detached_pages())
        assert sorted(self.free + reachable + detached) == list(range(N_PAGES))
        assert sorted(reachable) == sorted(self.cached.values())
        kept = {page for held in self.held for page in held.pages}
        assert self.tree.n_pages_leased == len(kept.intersection(reachable))
        assert self.tree.n_pages_evictable == len(set(reachable) - kept)
        assert self.tree.n_pages_reachable == len(reachable)
        assert self.tree.n_pages_detached == len(detached)
        for held in self.held:
            assert self.tree.pages(held.lease) == held.pages
            assert held.lease.detached == (held.detached_from is not None)
        named = {namespace for namespace, _ in self.cached}
        named |= {held.namespace for held in self.held if held.detached_from is None or held.detached_from > 0}
        assert named <= set(self.tree.namespaces())
        self._check_shared_runs()

    def _check_shared_runs(self) -> None:
        """True, in order, and all that any two of the leases have in common."""
        runs = self.tree.shared_runs([held.lease for held in self.held])
        assert runs == sorted(runs, key=lambda run: (run.leases[0], run.first_page))
        n_shared = dict.fromkeys(combinations(range(len(self.held)), 2), 0)
        for run in runs:
            end = run.first_page + run.n_pages
            first, *others = [self.held[i].pages[run.first_page : end] for i in run.leases]
            assert len(first) == run.n_pages
            assert others
            assert all(other == first for other in others)
            for pair in combinations(run.leases, 2):
                n_shared[pair] += run.n_pages
        for (i, j), n_pages in n_shared.items():
            pairs = zip(self.held[i].pages, self.held[j].pages, strict=False)
            assert n_pages == len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        begins = {(run.leases, run.first_page) for run in runs}
        assert not any((run.leases, run.first_page + run.n_pages) in begins for run in runs), "as long as can be"

    def _touch(self, held: Held) -> None:
        self.clock += 1
        for page in held.pages:
            self.used_at[page] = self.clock

    def _forget(self, freed: list[int], gone: object) -> None:
        assert callable(gone)
        kept = {page for held in self.held for page in held.pages}
        lost = {prefix: page for prefix, page in self.cached.items() if gone(prefix)}
        assert sorted(freed) == sorted(page for page in lost.values() if page not in kept)
        for prefix, page in lost.items():
            del self.cached[prefix]
            for held in self.held:
                if page in held.pages:
                    index = held.pages.index(page)
                    held.detached_from = index if held.detached_from is None else min(index, held.detached_from)
        self._give_back(freed)

    def _give_back(self, pages: list[int]) -> None:
        self.settled.difference_update(pages)
        self.free += pages


def draw_tokens(random: Random, world: World, most_pages: int) -> bytes:
    """Part of a sequence that is cached or leased, and a suffix: random prompts would share nothing."""
    known = [tokens for _, tokens in world.cached]
    stem = random.choice(known) if known and random.random() < 0.8 else b""
    stem = stem[: random.randrange(len(stem) // 4 + 1) * 4]
    return stem + pack_random(random, random.randrange(most_pages * world.page_size + 1))


def pack_random(random: Random, n_tokens: int) -> bytes:
    return pack(f"<{n_tokens}i", *random.choices((1, 2), k=n_tokens))


def run_script(seed: int, n_steps: int, page_size: int) -> World:
    """Every verb on random arguments, checked after each."""
    random, world = Random(seed), World(page_size)
    for _ in range(n_steps):
        verbs = ["lease", "lease", "match", "evict", "detach"]
        if world.held:
            verbs += [
                "commit",
                "commit",
                "commit",
                "extend",
                "fork",
                "release",
                "mark_computed",
                "mark_computed",
                "undo",
            ]
        verb = random.choice(verbs)
        namespace, tokens = random.choice(NAMESPACES[:3]), draw_tokens(random, world, 4)
        held = random.choice(world.held) if world.held else None
        version, before = world.tree.version, dict(world.cached)
        if verb == "lease" and len(world.held) < 8:
            world.lease(namespace, tokens)
        elif verb == "match":
            world.match(namespace, tokens)
        elif verb == "evict":
            world.evict(random.randrange(6))
        elif verb == "detach" and random.random() < 0.3:
            world.detach(namespace, tokens[: random.choice((0, len(tokens), len(tokens)))])
        elif held is not None:
            following = tokens.removeprefix(held.tokens)
            if verb == "commit":
                world.commit(held, following)
            elif verb == "extend":
                world.extend(held, following)
            elif verb == "fork" and len(world.held) < 8:
                world.fork(held)
            elif verb == "release":
                if random.random() < 0.8:
                    world.mark_computed(held, len(held.tokens) // 4)
                world.release(held)
            elif verb == "mark_computed":
                world.mark_computed(held, random.randrange(len(held.tokens) // 4 + 3))
            elif verb == "undo" and random.random() < 0.3:
                world.detach_uncomputed(held)
        world.check()
        if world.cached != before:
            assert world.tree.version != version
    return world
