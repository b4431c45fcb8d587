"""The radix tree next to a trivial model of it: a dictionary from every cached prefix to its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, takewhile

from xxhash import xxh3_64_intdigest

from radixkv.settings.config import EvictionPolicyName
from radixkv.tree.changes import RemovedPages, StoredPages
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.node import Lease, Namespace, Retention
from radixkv.tree.radix_tree import RadixTree
from support.eviction_models import GHOST_CAPACITY, MODELS, LruModel

NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"), Namespace(epoch=1), Namespace("t"))
N_PAGES = 64

Prefix = tuple[Namespace, bytes]


@dataclass(eq=False)
class TrackedLease:
    """An open lease and the tokens and pages that the model expects it to cover."""

    lease: Lease
    namespace: Namespace
    tokens: bytes
    pages: list[int]
    detached_from: int | None = None
    """Index of the first detached page of the path; None if no page is detached."""
    is_use: bool = True
    is_hit: bool = True


@dataclass(eq=False)
class TrackedRetention:
    """A retention and the pages that the model expects it to cover."""

    retention: Retention
    namespace: Namespace
    tokens: bytes
    pages: list[int]


@dataclass
class World:
    """Applies each operation to the tree and to the model, and compares the results."""

    page_size: int
    policy: EvictionPolicyName = "lru"
    tenants: tuple[str, ...] = ()
    """Those whose pages are counted apart."""
    tree: RadixTree = field(init=False)
    free: list[int] = field(default_factory=lambda: list(range(N_PAGES)))
    cached: dict[Prefix, int] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    dropped: set[Prefix] = field(default_factory=set)
    """The ends of computed pages that were dropped, and neither cached nor evicted since."""
    model: LruModel = field(init=False)
    """What the eviction policy must choose."""
    leases: list[TrackedLease] = field(default_factory=list)
    retentions: list[TrackedRetention] = field(default_factory=list)
    waiting: list[Prefix] = field(default_factory=list)
    """The prompts that wait, the first one first."""
    announced: dict[int, tuple[int | None, bytes]] = field(default_factory=dict)
    """By digest, the parent's digest and the tokens of each page that is stored by the tree's recorded changes."""

    def __post_init__(self) -> None:
        policy = open_eviction_policy(self.policy, GHOST_CAPACITY)
        self.tree = RadixTree(self.page_size, policy=policy, groups=self.tenants)
        self.tree.changes.is_on = True
        self.model = MODELS[self.policy]()

    @property
    def page_bytes(self) -> int:
        return 4 * self.page_size

    def expected_match(self, namespace: Namespace, tokens: bytes) -> int:
        n = 0
        while (n + 1) * self.page_bytes <= len(tokens) and (
            namespace,
            tokens[: (n + 1) * self.page_bytes],
        ) in self.cached:
            n += 1
        return n

    def path_pages(self, namespace: Namespace, tokens: bytes) -> list[int]:
        return [
            self.cached[namespace, tokens[:end]] for end in range(self.page_bytes, len(tokens) + 1, self.page_bytes)
        ]

    def match(self, namespace: Namespace, tokens: bytes) -> None:
        n = self.expected_match(namespace, tokens)
        assert self.tree.match(namespace, tokens) == n * self.page_size
        explanation = self.tree.explain(namespace, tokens)
        assert explanation.n_tokens == n * self.page_size
        assert (explanation.reason == "whole") == (n == len(tokens) // self.page_bytes)
        assert 0 <= explanation.n_partial < self.page_size
        shared = tokens[: (n * self.page_size + explanation.n_partial) * 4]
        pages = [p for (ns, prefix), p in self.cached.items() if ns == namespace and prefix.startswith(shared)]
        assert not explanation.n_partial or self.computed.intersection(pages)
        if explanation.reason == "other_namespace":
            assert explanation.namespace is not None
            assert self.expected_match(explanation.namespace, tokens) > n
        if explanation.reason == "never_seen":
            matched = tokens[: n * self.page_bytes]
            is_dropped = (namespace, tokens[: (n + 1) * self.page_bytes]) in self.dropped
            assert is_dropped or not any(
                ns == namespace and p.startswith(matched) and p != matched for ns, p in self.cached
            )

    def lease(
        self, namespace: Namespace, tokens: bytes, *, is_use: bool = True, is_hit: bool = True
    ) -> TrackedLease:
        n = self.expected_match(namespace, tokens)
        covered = tokens[: n * self.page_bytes]
        tracked = TrackedLease(
            self.tree.lease(namespace, tokens, is_use=is_use, is_hit=is_hit),
            namespace,
            covered,
            self.path_pages(namespace, covered),
            is_use=is_use,
            is_hit=is_use and is_hit,
        )
        assert tracked.lease.n_tokens == n * self.page_size
        self._find(tracked, tracked.pages)
        self.leases.append(tracked)
        return tracked

    def count_hit(self, tracked: TrackedLease) -> None:
        self.tree.count_hit(tracked.lease)
        tracked.is_hit = True
        self._find(tracked, tracked.pages)

    def commit(self, tracked: TrackedLease, tokens: bytes) -> None:
        tokens = tokens[: min(len(tokens) // self.page_bytes, len(self.free)) * self.page_bytes]
        pages = [self.free.pop() for _ in range(len(tokens) // self.page_bytes)]
        canonical = self.tree.commit(tracked.lease, tokens, pages)
        if tracked.detached_from is not None:
            assert canonical == []
            assert tracked.lease.n_tokens == len(tracked.tokens) // 4
            self.free += pages
            return
        n_cached = self.expected_match(tracked.namespace, tracked.tokens + tokens) - len(tracked.pages)
        whole = tracked.tokens + tokens
        cached_pages = self.path_pages(tracked.namespace, whole[: len(tracked.tokens) + n_cached * self.page_bytes])
        assert canonical == cached_pages[len(tracked.pages) :]
        assert tracked.lease.n_tokens == len(whole) // 4
        self._find(tracked, canonical)
        self.free += pages[:n_cached]
        for index in range(n_cached, len(pages)):
            prefix = tracked.namespace, whole[: len(tracked.tokens) + (index + 1) * self.page_bytes]
            self.cached[prefix] = pages[index]
            self.dropped.discard(prefix)
            self.model.added(pages[index], prefix)
        tracked.tokens = whole
        tracked.pages += canonical + pages[n_cached:]

    def commit_computed_page(self, tracked: TrackedLease, tokens: bytes) -> None:
        """Adds a page that is computed already, at once if the tree can, or else in two calls."""
        if len(tokens) < self.page_bytes or not self.free:
            return
        tokens, page = tokens[: self.page_bytes], self.free.pop()
        if self.tree.commit_computed_page(tracked.lease, tokens, page):
            assert tracked.detached_from is None
            assert self.computed.issuperset(tracked.pages), "only the next page is computed now"
            prefix = tracked.namespace, tracked.tokens + tokens
            assert prefix not in self.cached
            self.cached[prefix] = page
            self.dropped.discard(prefix)
            self.model.added(page, prefix)
            self.computed.add(page)
            tracked.tokens += tokens
            tracked.pages.append(page)
        else:
            self.free.append(page)
            self.commit(tracked, tokens)
            self.mark_computed(tracked, len(tracked.tokens) // 4)

    def extend(self, tracked: TrackedLease, tokens: bytes) -> None:
        new_pages = self.tree.extend(tracked.lease, tokens)
        if tracked.detached_from is not None:
            assert new_pages == []
            return
        n = self.expected_match(tracked.namespace, tracked.tokens + tokens)
        tracked.tokens = (tracked.tokens + tokens)[: n * self.page_bytes]
        pages = self.path_pages(tracked.namespace, tracked.tokens)
        assert new_pages == pages[len(tracked.pages) :]
        self._find(tracked, new_pages)
        tracked.pages = pages

    def continue_(self, tracked: TrackedLease, tail: bytes, n_tokens: int) -> None:
        """Asks how cached sequences go on after a lease and a tail; ``check`` shows if that changes the tree."""
        version = self.tree.version
        found = self.tree.continuation(tracked.lease, tail, n_tokens)
        assert self.tree.version == version
        stem = tracked.tokens + tail
        computed = {
            prefix
            for (namespace, prefix), page in self.cached.items()
            if namespace == tracked.namespace and tracked.detached_from is None and page in self.computed
        }
        continuing = {prefix for prefix in computed if prefix.startswith(stem) and prefix != stem}
        assert bool(found) == bool(continuing)
        if found:
            assert len(found) % 4 == 0
            assert any(prefix.startswith(stem + found) for prefix in continuing)
            is_end = not any(prefix.startswith(stem + found) and prefix != stem + found for prefix in continuing)
            assert len(found) == n_tokens * 4 or (len(found) < n_tokens * 4 and is_end)

    def fork(self, tracked: TrackedLease) -> None:
        second = self.tree.fork(tracked.lease)
        self.leases.append(replace(tracked, lease=second, pages=list(tracked.pages)))

    def lease_partial_page(self, tracked: TrackedLease, tokens: bytes, min_tokens: int, max_tokens: int) -> None:
        tokens = tokens[: self.page_bytes]
        partial = self.tree.lease_partial_page(tracked.lease, tokens, min_tokens=min_tokens, max_tokens=max_tokens)
        end = len(tracked.tokens)
        following = {
            page: (prefix, _n_common_tokens(prefix[end:], tokens))
            for (namespace, prefix), page in self.cached.items()
            if (namespace, prefix[:end]) == (tracked.namespace, tracked.tokens)
            and len(prefix) == end + self.page_bytes
            and tracked.detached_from is None
        }
        most = max((n_common for _, n_common in following.values()), default=0)
        nearest = {page for page, (_, n_common) in following.items() if n_common == most}
        if most < min_tokens or max_tokens < min_tokens or most == self.page_size:
            assert partial is None
        elif nearest <= self.computed:
            assert partial is not None
            assert partial.page in nearest
        if partial is not None:
            prefix, n_common = following[partial.page]
            assert partial.page in self.computed
            assert partial.n_tokens == min(n_common, max_tokens) >= min_tokens
            second = replace(tracked, lease=partial.lease, tokens=prefix, is_use=False, is_hit=False)
            second.pages = [*tracked.pages, partial.page]
            self.leases.append(second)

    def release(self, tracked: TrackedLease) -> None:
        self.leases.remove(tracked)
        if tracked.is_use:
            self.model.used(tracked.pages)
        leased = {page for other in self.leases for page in other.pages}
        first_detached = len(tracked.pages) if tracked.detached_from is None else tracked.detached_from
        expected = [
            page
            for index, page in enumerate(tracked.pages)
            if page not in leased and (index >= first_detached or page not in self.computed)
        ]
        freed = self.tree.release(tracked.lease)
        assert sorted(freed) == sorted(expected)
        self.cached = {prefix: page for prefix, page in self.cached.items() if page not in expected}
        self._trim_retentions()
        self._free_pages(freed)

    def mark_computed(self, tracked: TrackedLease, n_tokens: int) -> None:
        self.tree.mark_computed(tracked.lease, n_tokens)
        self.computed.update(tracked.pages[: n_tokens // self.page_size])

    def detach_uncomputed(self, tracked: TrackedLease) -> None:
        freed = self.tree.detach_uncomputed(tracked.lease)
        uncomputed = [index for index, page in enumerate(tracked.pages) if page not in self.computed]
        if uncomputed and (tracked.detached_from is None or uncomputed[0] < tracked.detached_from):
            end = (uncomputed[0] + 1) * self.page_bytes
            top = tracked.tokens[:end]
            self._drop_detached(freed, lambda prefix: prefix[0] == tracked.namespace and prefix[1].startswith(top))
        else:
            assert freed == []

    def detach(self, namespace: Namespace, tokens: bytes) -> None:
        stem = tokens[: len(tokens) // self.page_bytes * self.page_bytes]
        left = {end for ns, end in self.cached if ns == namespace and not end.startswith(stem)}
        end = min(self.expected_match(namespace, stem) * self.page_bytes, len(stem) - self.page_bytes)
        while end > 0 and not any(p.startswith(stem[:end]) and p != stem[:end] for p in left):
            left.discard(stem[:end])
            end -= self.page_bytes
        freed = self.tree.detach(namespace, tokens)
        self._drop_detached(freed, lambda prefix: prefix[0] == namespace and prefix[1] not in left)
        if not stem:
            for tracked in self.leases:
                if tracked.namespace == namespace and tracked.detached_from is None:
                    tracked.detached_from = len(tracked.pages)

    def demote(self, namespace: Namespace, tokens: bytes, n_kept: int) -> None:
        n_demoted = self.tree.demotions.add(namespace, tokens, n_kept * self.page_size)
        n = self.expected_match(namespace, tokens)
        pages = self.path_pages(namespace, tokens[: n * self.page_bytes])[n_kept:]
        assert n_demoted == self.model.demoted(pages)
        assert self.tree.demotions.reach_end(namespace, tokens[: n * self.page_bytes]) or not pages

    def group_of(self, namespace: Namespace) -> str:
        return namespace.tenant if namespace.tenant in self.tenants else ""

    def n_evictable_by_group(self) -> Counter[str]:
        leased = {page for tracked in self.leases for page in tracked.pages}
        return Counter(
            self.group_of(namespace) for (namespace, _), page in self.cached.items() if page not in leased
        )

    def needed_by(self) -> dict[int, int]:
        """By page, the index of the first waiting or expected prompt that needs it."""
        orders: dict[int, int] = {}
        for order, (namespace, tokens) in enumerate(self.waiting):
            n = self.expected_match(namespace, tokens)
            for page in self.path_pages(namespace, tokens[: n * self.page_bytes]):
                orders.setdefault(page, order)
        return orders

    def evict(
        self,
        n_pages: int,
        quotas: dict[str, int] | None = None,
        n_beyond: int = 0,
        n_required: int | None = None,
        n_waiting: int = 6,
    ) -> None:
        """Evicts. Of the prompts the first ``n_waiting`` wait, and the others are expected."""
        left = self.n_evictable_by_group() if quotas is None else Counter(quotas)
        n_evictable = (left & self.n_evictable_by_group()).total()
        n_required = n_pages if n_required is None else n_required
        needed_by = self.needed_by()
        nodes = {(stored.namespace, stored.tokens) for stored in self.tree.computed_pages()}
        waiting = [(namespace, bytes(bytearray(tokens))) for namespace, tokens in self.waiting]
        runs = self.tree.evict(
            n_pages,
            quotas,
            n_beyond=n_beyond,
            waiting=waiting[:n_waiting],
            expected=waiting[n_waiting:],
            n_required=n_required,
        )
        n_evicted, n_before = sum(len(run.pages) for run in runs), 0
        assert min(n_required, n_evictable) <= n_evicted <= min(n_pages + n_beyond, n_evictable)
        if n_evicted > n_pages:
            assert (runs[-1].namespace, runs[-1].tokens) in nodes, "it evicts more than asked only to end a leaf"
        leased = {page for tracked in self.leases for page in tracked.pages}
        prefix_of = {page: prefix for prefix, page in self.cached.items()}
        for run in runs:
            n_cached = len(self.cached)
            namespace, last = prefix_of[run.pages[-1]]
            assert run.namespace == namespace
            assert last.endswith(run.tokens)
            assert len(run.tokens) == self.page_bytes * len(run.pages)
            groups = [group for group in ("", *self.tenants) if left[group] > 0]
            group = self.group_of(namespace)
            assert group in groups
            if self.policy == "adaptive":  # it compares the leaves of the group with the smallest rank
                groups = [group]
            leaves = self._evictable_leaves(groups)
            retained = self.retained_pages()
            leaves = [page for page in leaves if page not in retained] or leaves
            orders = {needed_by.get(page) for page in run.pages}
            n_before += len(run.pages)
            assert n_before <= n_required or retained.isdisjoint(run.pages), "more retained pages go than must"
            if orders == {None}:
                self.model.check_victim(run.pages[-1], [page for page in leaves if page not in needed_by])
            else:
                groups = [group for group in ("", *self.tenants) if left[group] > 0]
                leaves = self._evictable_leaves(groups)
                leaves = [page for page in leaves if page not in retained] or leaves
                assert needed_by.keys() >= set(leaves), "a needed page goes before one that nobody needs"
                assert orders == {max(needed_by[page] for page in leaves)}, "the pages needed last go first"
                is_waited_for = max(needed_by[page] for page in leaves) < n_waiting
                assert n_before <= n_required or not is_waited_for, "more needed pages are evicted than must be"
            left[group] -= len(run.pages)
            self.model.evicted(run.pages, [prefix_of[page] for page in run.pages], n_cached)
            for page in reversed(run.pages):
                prefix = prefix_of[page]
                assert page not in leased
                assert not any(ns == prefix[0] and t[: -self.page_bytes] == prefix[1] for ns, t in self.cached)
                del self.cached[prefix]
            self._trim_retentions()
            self._free_pages(run.pages)
        if n_evicted < min(n_pages, n_evictable):
            leaves = self._evictable_leaves([group for group in ("", *self.tenants) if left[group] > 0])
            leaves = [page for page in leaves if page not in self.retained_pages()]
            assert all(needed_by.get(page, n_waiting) < n_waiting for page in leaves), (
                "fewer pages than asked are evicted, though no prompt waits for some"
            )

    def _evictable_leaves(self, groups: Collection[str]) -> list[int]:
        """The last pages of sequences of some groups that no lease holds."""
        leased = {page for tracked in self.leases for page in tracked.pages}
        inner = {(namespace, tokens[: -self.page_bytes]) for namespace, tokens in self.cached}
        return [
            page
            for prefix, page in self.cached.items()
            if prefix not in inner and page not in leased and self.group_of(prefix[0]) in groups
        ]

    def retain(self, namespace: Namespace, tokens: bytes, until: float) -> None:
        pages = self.path_pages(namespace, tokens[: self.expected_match(namespace, tokens) * self.page_bytes])
        retention = self.tree.retentions.add(namespace, tokens, until)
        assert (retention.node is None) == (not pages)
        if pages:
            tokens = tokens[: len(pages) * self.page_bytes]
            self.retentions.append(TrackedRetention(retention, namespace, tokens, pages))

    def end_retention(self, tracked: TrackedRetention) -> None:
        self.retentions.remove(tracked)
        self.tree.retentions.remove(tracked.retention)

    def find_retained(self, namespace: Namespace, tokens: bytes) -> None:
        n = self.expected_match(namespace, tokens)
        found = self.tree.retentions.find(namespace, tokens)
        path = self.path_pages(namespace, tokens[: n * self.page_bytes])
        n_retained = len(self.retained_pages().intersection(path))
        covering = [one.retention for one in self.retentions if n_retained and path[n_retained - 1] in one.pages]
        ending = [one for one in self.retentions if one.pages and one.pages == path[: len(one.pages)]]
        assert found.n_cached == n
        assert found.n_retained == n_retained
        until = self.tree.retentions.until(namespace, tokens)
        assert until == max((retention.until for retention in covering), default=0.0)
        found_ending = self.tree.retentions.ending(namespace, tokens)
        assert {id(retention) for retention in found_ending} == {id(one.retention) for one in ending}

    def retained_pages(self, namespace: Namespace | None = None) -> set[int]:
        return {page for one in self.retentions if namespace in (None, one.namespace) for page in one.pages}

    def check(self) -> None:
        """Checks that tree and model agree, and that every page is in exactly one place."""
        self.tree.check()
        self.tree.check(deep=False)
        reachable, detached = list(self.tree.reachable_pages()), list(self.tree.detached_pages())
        assert sorted(self.free + reachable + detached) == list(range(N_PAGES))
        assert sorted(reachable) == sorted(self.cached.values())
        leased = {page for tracked in self.leases for page in tracked.pages}
        assert self.tree.n_pages_leased == len(leased.intersection(reachable))
        assert self.tree.n_pages_evictable == len(set(reachable) - leased)
        assert self.tree.n_pages_reachable == len(reachable)
        n_evictable = self.n_evictable_by_group()
        for tenant in self.tenants:
            assert self.tree.n_pages_evictable_by_group[tenant] == n_evictable[tenant]
        assert self.tree.n_pages_detached == len(detached)
        assert self.tree.retentions.n_pages == len(self.retained_pages())
        for namespace in NAMESPACES:
            assert self.tree.retentions.n_pages_of(namespace) == len(self.retained_pages(namespace))
        for tracked in self.leases:
            assert self.tree.pages(tracked.lease) == tracked.pages
            assert tracked.lease.detached == (tracked.detached_from is not None)
        expected = {namespace for namespace, _ in self.cached}
        expected |= {
            tracked.namespace
            for tracked in self.leases
            if tracked.detached_from is None or tracked.detached_from > 0
        }
        assert expected <= set(self.tree.namespaces())
        self._check_shared_runs()
        self._check_changes()

    def _check_changes(self) -> None:
        """Checks that the recorded changes give exactly the computed pages that a match can find."""
        for change in self.tree.changes.take():
            if isinstance(change, RemovedPages):
                for digest in change.digests:
                    del self.announced[digest]
            else:
                self._announce(self.announced, change)
        assert self.tree.changes.n_pages == len(self.announced)
        expected = {
            self._digest(namespace, tokens): (
                None if len(tokens) == self.page_bytes else self._digest(namespace, tokens[: -self.page_bytes]),
                tokens[-self.page_bytes :],
            )
            for (namespace, tokens), page in self.cached.items()
            if page in self.computed
        }
        assert self.announced == expected
        walked: dict[int, tuple[int | None, bytes]] = {}
        for run in self.tree.computed_pages():
            self._announce(walked, run)
        assert walked == expected

    def _announce(self, announced: dict[int, tuple[int | None, bytes]], run: StoredPages) -> None:
        parent = run.parent_digest
        assert len(run.digests) * self.page_bytes == len(run.tokens) > 0
        for index, digest in enumerate(run.digests):
            assert digest not in announced, "a page is stored twice"
            assert parent is None or parent in announced, "a page is stored before the one that it continues"
            announced[digest] = parent, run.tokens[index * self.page_bytes : (index + 1) * self.page_bytes]
            parent = digest

    def _digest(self, namespace: Namespace, tokens: bytes) -> int:
        """Returns a page's digest: a chain of xxh3_64 over the namespace and the pages up to it."""
        fields = namespace.tenant, namespace.salt, namespace.adapter, namespace.epoch
        return _digest_chain(repr(fields).encode(), tokens, self.page_bytes)

    def _check_shared_runs(self) -> None:
        """Checks that the shared runs are right, ordered, maximal and complete for every pair of leases."""
        runs = self.tree.shared_runs([tracked.lease for tracked in self.leases])
        assert runs == sorted(runs, key=lambda run: (run.leases[0], run.first_page))
        n_shared = dict.fromkeys(combinations(range(len(self.leases)), 2), 0)
        for run in runs:
            end = run.first_page + run.n_pages
            first, *others = [self.leases[i].pages[run.first_page : end] for i in run.leases]
            assert len(first) == run.n_pages
            assert others
            assert all(other == first for other in others)
            for pair in combinations(run.leases, 2):
                n_shared[pair] += run.n_pages
        for (i, j), n_pages in n_shared.items():
            pairs = zip(self.leases[i].pages, self.leases[j].pages, strict=False)
            assert n_pages == len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        starts = {(run.leases, run.first_page) for run in runs}
        assert not any((run.leases, run.first_page + run.n_pages) in starts for run in runs), "the runs are maximal"

    def _find(self, tracked: TrackedLease, pages: list[int]) -> None:
        """Tells the model that a lease has found pages, before it counts as one of their holders."""
        if tracked.is_hit:
            held = {page for other in self.leases if other is not tracked for page in other.pages}
            self.model.found(pages, held)

    def _drop_detached(self, freed: list[int], is_detached: object) -> None:
        assert callable(is_detached)
        leased = {page for tracked in self.leases for page in tracked.pages}
        detached = {prefix: page for prefix, page in self.cached.items() if is_detached(prefix)}
        assert sorted(freed) == sorted(page for page in detached.values() if page not in leased)
        for prefix, page in detached.items():
            del self.cached[prefix]
            if page in self.computed:
                self.dropped.add(prefix)
            for tracked in self.leases:
                if page in tracked.pages:
                    index = tracked.pages.index(page)
                    tracked.detached_from = (
                        index if tracked.detached_from is None else min(index, tracked.detached_from)
                    )
        self._trim_retentions()
        self._free_pages(freed)

    def _trim_retentions(self) -> None:
        """Takes the pages that are no longer cached out of the retentions."""
        cached = set(self.cached.values())
        for one in self.retentions:
            one.pages = list(takewhile(cached.__contains__, one.pages))

    def _free_pages(self, pages: list[int]) -> None:
        self.computed.difference_update(pages)
        self.model.freed(pages)
        self.free += pages


@cache
def _digest_chain(root: bytes, tokens: bytes, page_bytes: int) -> int:
    if not tokens:
        return xxh3_64_intdigest(root, 0)
    return xxh3_64_intdigest(tokens[-page_bytes:], _digest_chain(root, tokens[:-page_bytes], page_bytes))


def _n_common_tokens(page: bytes, other: bytes) -> int:
    tokens = zip(memoryview(page).cast("i"), memoryview(other).cast("i"), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], tokens)))
