"""Stateful property test: the tree and its model agree under operations that Hypothesis chooses and shrinks."""

from __future__ import annotations

import sys
from struct import pack

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.settings.config import EvictionPolicyName
from support.tree_world import NAMESPACES, TrackedLease, World

namespaces = st.sampled_from(NAMESPACES)
suffixes = st.lists(st.sampled_from((1, 2)), max_size=8).map(lambda ids: pack(f"<{len(ids)}i", *ids))
fractions = st.integers(0, 16)
quotas = st.integers(0, 6)


class TreeMachine(RuleBasedStateMachine):
    """Applies random operations. Prompts are part of a cached sequence and a suffix: random ones share nothing."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.caught_before = sys.exc_info()[1]

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        policy=st.sampled_from(("lru", "lfuda", "adaptive")),
        tenants=st.sampled_from(((), ("t",))),
    )
    def begin(self, page_size: int, policy: EvictionPolicyName, tenants: tuple[str, ...]) -> None:
        self.world = World(page_size, policy, tenants)
        self.seen = self.world.tree.version, dict(self.world.cached)

    def prompt(self, index: int, fraction: int, suffix: bytes) -> bytes:
        cached_tokens = [tokens for _, tokens in self.world.cached]
        stem = cached_tokens[index % len(cached_tokens)] if cached_tokens else b""
        return stem[: len(stem) // 4 * fraction // 16 * 4] + suffix

    def chosen(self, index: int) -> TrackedLease:
        return self.world.leases[index % len(self.world.leases)]

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def match(self, namespace, index, fraction, suffix):
        self.world.match(namespace, self.prompt(index, fraction, suffix))

    @precondition(lambda self: len(self.world.leases) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def start(self, namespace, index, fraction, suffix):
        """Starts a request: leases the cached prefix of its prompt, and commits the rest."""
        tokens = self.prompt(index, fraction, suffix)
        tracked = self.world.lease(namespace, tokens)
        self.world.commit(tracked, tokens[len(tracked.tokens) :])

    @precondition(lambda self: len(self.world.leases) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def serve(self, namespace, index, fraction, suffix):
        """Starts and ends a request whose KV is all computed, so that its pages can be evicted."""
        self.start(namespace, index, fraction, suffix)
        self.finish(-1)

    @precondition(lambda self: len(self.world.leases) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes, starts=st.booleans())
    def look_before_the_start(self, namespace, index, fraction, suffix, starts):
        """Leases the cached prefix of a prompt, which is a hit only if its request starts."""
        tokens = self.prompt(index, fraction, suffix)
        tracked = self.world.lease(namespace, tokens, is_hit=False)
        if starts:
            self.world.count_hit(tracked)
            self.world.commit(tracked, tokens[len(tracked.tokens) :])
        else:
            self.world.release(tracked)

    @precondition(lambda self: len(self.world.leases) < 7)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def start_twice_in_one_step(self, namespace, index, fraction, suffix):
        """Starts two requests that lease before either commits: the second commit returns the first one's pages."""
        tokens = self.prompt(index, fraction, suffix)
        pair = [self.world.lease(namespace, tokens) for _ in range(2)]
        for tracked in pair:
            self.world.commit(tracked, tokens[len(tracked.tokens) :])

    @precondition(lambda self: len(self.world.leases) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def copy_in(self, namespace, index, fraction, suffix):
        """Adds pages to the tree for no request: a use, and no hit of the pages before them."""
        tokens = self.prompt(index, fraction, suffix)
        tracked = self.world.lease(namespace, tokens, is_hit=False)
        self.world.commit(tracked, tokens[len(tracked.tokens) :])

    @precondition(lambda self: len(self.world.leases) < 8)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions)
    def copy_out(self, namespace, index, fraction):
        """Pins pages for a copy of them, which changes nothing in the order of eviction."""
        self.world.lease(namespace, self.prompt(index, fraction, b""), is_use=False)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0), suffix=suffixes)
    def commit(self, index, suffix):
        tracked = self.chosen(index)
        if tracked.is_use:
            self.world.commit(tracked, suffix)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0), suffix=suffixes)
    def continue_an_answer(self, index, suffix):
        """Adds a page whose KV a request has computed before it is committed."""
        tracked = self.chosen(index)
        if tracked.is_use:
            self.world.commit_computed_page(tracked, suffix)

    @precondition(lambda self: 0 < len(self.world.leases) < 8)
    @rule(index=st.integers(0), suffix=suffixes)
    def continue_an_answer_beside_a_fork(self, index, suffix):
        """Adds a computed page after a path that a second request holds, and of which all pages are computed."""
        tracked = self.chosen(index)
        if tracked.is_use:
            self.world.mark_computed(tracked, len(tracked.tokens) // 4)
            self.world.fork(tracked)
            self.world.commit_computed_page(tracked, suffix)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0), suffix=suffixes)
    def extend(self, index, suffix):
        self.world.extend(self.chosen(index), suffix)

    @precondition(lambda self: self.world.leases)
    @rule(
        index=st.integers(0),
        other=st.integers(0),
        fraction=fractions,
        suffix=st.just(b"") | suffixes,
        n_tokens=st.integers(1, 12),
    )
    def guess_how_an_answer_goes_on(self, index, other, fraction, suffix, n_tokens):
        """Looks for what follows a path and a tail, which is mostly how a cached sequence goes on."""
        tracked = self.chosen(index)
        stem = tracked.tokens
        rests = [prefix[len(stem) :] for _, prefix in self.world.cached if prefix.startswith(stem)]
        rest = rests[other % len(rests)] if rests else b""
        self.world.continue_(tracked, rest[: len(rest) // 4 * fraction // 16 * 4] + suffix, n_tokens)

    @precondition(lambda self: 0 < len(self.world.leases) < 8)
    @rule(index=st.integers(0))
    def fork(self, index):
        self.world.fork(self.chosen(index))

    @precondition(lambda self: 0 < len(self.world.leases) < 8)
    @rule(
        index=st.integers(0),
        suffix=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4).map(
            lambda ids: pack(f"<{len(ids)}i", *ids)
        ),
        min_tokens=st.sampled_from((1, 1, 2)),
        max_tokens=st.integers(0, 4),
    )
    def lease_partial_page(self, index, suffix, min_tokens, max_tokens):
        """Pins a page of which a request can use the first tokens only."""
        self.world.lease_partial_page(self.chosen(index), suffix, min_tokens, max_tokens)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0))
    def release(self, index):
        self.world.release(self.chosen(index))

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0))
    def finish(self, index):
        """Ends a request whose KV is all computed, so that its pages become evictable."""
        tracked = self.chosen(index)
        self.world.mark_computed(tracked, len(tracked.tokens) // 4)
        self.world.release(tracked)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0), n_tokens=st.integers(0, 40))
    def mark_computed(self, index, n_tokens):
        self.world.mark_computed(self.chosen(index), n_tokens)

    @precondition(lambda self: self.world.leases)
    @rule(index=st.integers(0))
    def detach_uncomputed(self, index):
        self.world.detach_uncomputed(self.chosen(index))

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def detach(self, namespace, index, fraction, suffix):
        self.world.detach(namespace, self.prompt(index, fraction, suffix))

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes, n_kept=st.integers(0, 3))
    def demote(self, namespace, index, fraction, suffix, n_kept):
        self.world.demote(namespace, self.prompt(index, fraction, suffix), n_kept)

    @precondition(lambda self: len(self.world.retentions) < 6)
    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes, until=st.integers(1, 9))
    def retain(self, namespace, index, fraction, suffix, until):
        self.world.retain(namespace, self.prompt(index, fraction, suffix), float(until))

    @precondition(lambda self: self.world.leases and len(self.world.retentions) < 6)
    @rule(index=st.integers(0), suffix=suffixes, until=st.integers(1, 9))
    def retain_and_commit(self, index, suffix, until):
        """Retains what a request has so far. What it commits after that is not retained."""
        tracked = self.chosen(index)
        if tracked.is_use:
            self.world.retain(tracked.lease.namespace, tracked.tokens, float(until))
            self.world.commit(tracked, suffix)

    @precondition(lambda self: self.world.retentions)
    @rule(index=st.integers(0))
    def end_retention(self, index):
        self.world.end_retention(self.world.retentions[index % len(self.world.retentions)])

    @rule(namespace=namespaces, index=st.integers(0), fraction=fractions, suffix=suffixes)
    def find_retained(self, namespace, index, fraction, suffix):
        self.world.find_retained(namespace, self.prompt(index, fraction, suffix))

    @precondition(lambda self: self.world.cached and len(self.world.waiting) < 6)
    @rule(index=st.integers(0), suffix=suffixes, place=st.integers(0, 6))
    def wait(self, index, suffix, place):
        """Queues a prompt that continues a cached sequence, before or after those that wait."""
        cached = list(self.world.cached)
        namespace, tokens = cached[index % len(cached)]
        self.world.waiting.insert(place, (namespace, tokens + suffix))

    @precondition(lambda self: self.world.waiting)
    @rule(index=st.integers(0))
    def wait_no_more(self, index):
        self.world.waiting.pop(index % len(self.world.waiting))

    @rule(
        n_pages=st.integers(0, 8),
        n_beyond=st.integers(0, 3),
        n_required=st.none() | st.integers(0, 8),
        n_waiting=st.integers(0, 6),
    )
    def evict(self, n_pages, n_beyond, n_required, n_waiting):
        n_required = None if n_required is None else min(n_required, n_pages)
        self.world.evict(n_pages, n_beyond=n_beyond if n_pages else 0, n_required=n_required, n_waiting=n_waiting)

    @precondition(lambda self: self.world.waiting)
    @rule(
        n_left=st.integers(0, 6),
        n_beyond=st.integers(0, 3),
        n_required=st.none() | st.integers(0, 8),
        n_waiting=st.integers(0, 6),
    )
    def evict_what_is_needed(self, n_left, n_beyond, n_required, n_waiting):
        n_pages = max(0, self.world.tree.n_pages_evictable - n_left)
        n_required = None if n_required is None else min(n_required, n_pages)
        self.world.evict(n_pages, n_beyond=n_beyond, n_required=n_required, n_waiting=n_waiting)

    @rule(n_pages=st.integers(1, 8), quotas=st.tuples(quotas, quotas), n_beyond=st.integers(0, 3))
    def evict_by_quotas(self, n_pages, quotas, n_beyond):
        groups = ("", *self.world.tenants)
        self.world.evict(n_pages, dict(zip(groups, quotas, strict=False)), n_beyond)

    @invariant()
    def tree_and_model_agree(self):
        if hasattr(self, "world"):
            self.world.check()
            before, self.seen = self.seen, (self.world.tree.version, dict(self.world.cached))
            assert self.seen[1] == before[1] or self.seen[0] != before[0], "the version stands still"

    def teardown(self):
        """Releases and evicts everything: no page may be lost."""
        if not hasattr(self, "world") or sys.exc_info()[1] is not self.caught_before:
            return
        for tracked in list(self.world.leases):
            self.world.release(tracked)
        self.world.check()
        assert self.world.tree.n_pages_leased == self.world.tree.n_pages_detached == 0
        self.world.evict(1000)
        self.world.check()
        assert self.world.tree.retentions.n_pages == 0
        assert self.world.tree.namespaces() == []
