"""Naive eviction policies over single pages, which know what the tree's policies must choose."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

GHOST_CAPACITY = 2.0


class Observation(NamedTuple):
    n_hits: int
    group: int
    """Bit length of the age."""
    was_used: bool


@dataclass
class PageUse:
    n_hits: int = 0
    used_at: int = 0
    priority: int = 0
    is_demoted: bool = False


class LruModel:
    """The page whose last use is oldest; a demoted one before it. Learns from each operation of the tree."""

    def __init__(self) -> None:
        self.now = 0
        self.pages: dict[int, PageUse] = {}

    def found(self, pages: Sequence[int], held: Collection[int]) -> None:
        """A request has found the pages; other leases hold some of them."""
        for page in pages:
            self.pages[page].n_hits += 1

    def added(self, page: int, prefix: Any) -> None:
        self.pages[page] = PageUse()

    def used(self, pages: Sequence[int]) -> None:
        self.now += 1
        for page in pages:
            use = self.pages[page]
            use.used_at, use.is_demoted, use.priority = self.now, False, self.priority(use)

    def priority(self, use: PageUse) -> int:
        return 0

    def demoted(self, pages: Sequence[int]) -> int:
        """Returns how many of the pages were not demoted before."""
        new = [page for page in pages if not self.pages[page].is_demoted]
        for page in new:
            self.pages[page].is_demoted = True
        return len(new)

    def check_victim(self, victim: int, leaves: Sequence[int]) -> None:
        demoted = [page for page in leaves if self.pages[page].is_demoted]
        if demoted:
            assert victim in demoted
        else:
            self.check_choice(self.pages[victim], [self.pages[page] for page in leaves])

    def check_choice(self, victim: PageUse, leaves: Sequence[PageUse]) -> None:
        assert victim.used_at == min(use.used_at for use in leaves)

    def evicted(self, pages: Sequence[int], prefixes: Sequence[Any], n_cached: int) -> None:
        """The last pages of a leaf are evicted from ``n_cached`` pages."""

    def freed(self, pages: Collection[int]) -> None:
        for page in pages:
            del self.pages[page]


class LfudaModel(LruModel):
    age = 0

    def priority(self, use: PageUse) -> int:
        return use.n_hits + 1 + self.age

    def check_choice(self, victim: PageUse, leaves: Sequence[PageUse]) -> None:
        assert (victim.priority, victim.used_at) == min((use.priority, use.used_at) for use in leaves)
        # Not that of a page which goes because waiting prompts need it last: no policy chooses that.
        self.age = max(self.age, victim.priority)


class AdaptiveModel(LruModel):
    """Keeps every observation, and computes what it needs from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: dict[Any, tuple[int, int]] = {}
        self.max_cached = 0
        self.observations: list[Observation] = []
        self.weights: list[float] = []
        self.known: list[tuple[Observation, float]] = []
        """The observations of the last update, and what each counts."""

    def observe(self, n_hits: int, age: int, *, was_used: bool) -> None:
        self.observations.append(Observation(min(n_hits, 5), age.bit_length(), was_used))

    def found(self, pages: Sequence[int], held: Collection[int]) -> None:
        for page in pages:
            use = self.pages[page]
            if not use.is_demoted:
                self.observe(use.n_hits, 0 if page in held else self.now - use.used_at, was_used=True)
        super().found(pages, held)

    def added(self, page: int, prefix: Any) -> None:
        super().added(page, prefix)
        if prefix in self.ghosts:
            n_hits, used_at = self.ghosts.pop(prefix)
            self.observe(n_hits, self.now - used_at, was_used=True)
            self.pages[page].n_hits = n_hits + 1

    def check_choice(self, victim: PageUse, leaves: Sequence[PageUse]) -> None:
        if 4 * (len(self.observations) - len(self.weights)) >= self.max_cached:
            self.weights += [1.0] * (len(self.observations) - len(self.weights))
            self.known = list(zip(self.observations, self.weights, strict=True))
            self.weights = [0.97 * weight for weight in self.weights]
        oldest: dict[int, PageUse] = {}
        for use in sorted(leaves, key=lambda use: use.used_at):
            oldest.setdefault(min(use.n_hits, 5), use)
        least = min(map(self.rate, oldest.values()))
        assert math.isclose(self.rate(victim), least, abs_tol=1e-12)
        assert victim.used_at == oldest[min(victim.n_hits, 5)].used_at
        if least == 0:
            assert victim.used_at == min(use.used_at for use in oldest.values() if self.rate(use) == 0)

    def rate(self, use: PageUse) -> float:
        """The best of hits / waits over all groups of ages up to which the page may be kept."""
        first = (self.now - use.used_at).bit_length()
        peers = [
            (seen, weight)
            for seen, weight in self.known
            if seen.n_hits == min(use.n_hits, 5) and seen.group >= first
        ]
        best = 0.0
        for last in {seen.group for seen, _ in peers}:
            hits = sum(weight for seen, weight in peers if seen.was_used and seen.group <= last)
            waits = sum(
                weight * 2.0 ** (group - 1) * (0.5 if group == seen.group else 1)
                for seen, weight in peers
                for group in range(first, min(seen.group, last) + 1)
            )
            best = max(best, hits / waits)
        return best

    def evicted(self, pages: Sequence[int], prefixes: Sequence[Any], n_cached: int) -> None:
        self.max_cached = max(self.max_cached, n_cached)
        for page, prefix in zip(pages, prefixes, strict=True):
            use = self.pages[page]
            if not use.is_demoted:
                self.ghosts.pop(prefix, None)
                self.ghosts[prefix] = use.n_hits, use.used_at
        while len(self.ghosts) > GHOST_CAPACITY * self.max_cached:
            n_hits, used_at = self.ghosts.pop(next(iter(self.ghosts)))
            self.observe(n_hits, self.now - used_at, was_used=False)


MODELS: dict[str, type[LruModel]] = {"lru": LruModel, "lfuda": LfudaModel, "adaptive": AdaptiveModel}
"""By the names of ``CacheConfig.eviction_policy``."""
