"""Memory of the pages that have left the cache, for explanations of misses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Departure = Literal["evicted", "dropped", "forgotten"]
"""Why a page is not cached: it was evicted; it was dropped on request, by a flush or an invalidation; or something
was forgotten, so that it may have been either, or never cached."""

MAX_PAGES = 1 << 20
_WAYS = 8
"""Digests of a bucket."""
_TAG = 3
"""Low bits of an entry of the table, which are no part of the digest: 3 if the page was evicted, 2 if dropped."""


class PageHistory:
    """Remembers why pages have left the cache, by their chained digests, in bounded memory.

    A table of buckets of eight digests. A digest displaces the oldest one of a full bucket, so about the last
    ``max_pages`` digests are remembered; before a quarter as many, hardly any is forgotten. A full bucket may have
    forgotten something, so nothing is said of digests that it lacks. Memory: 8 bytes a digest, which the system
    provides when they are first used.

    Args:
        max_pages: digests that the table has room for, a multiple of 8.
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        assert max_pages >= _WAYS
        assert max_pages % _WAYS == 0
        self._n_buckets = max_pages // _WAYS
        self._table = memoryview(bytearray(8 * max_pages)).cast("Q")  # newest first in each bucket; 0: nothing
        self.is_empty = True

    def add(self, digests: Iterable[int], *, is_evicted: bool) -> None:
        """Notes that pages leave the cache: evicted, or dropped. Replaces what was noted of them. O(1) a page."""
        table, n_buckets = self._table, self._n_buckets
        self.is_empty = False
        for digest in digests:
            start = (digest >> 2) % n_buckets * _WAYS
            name = digest | _TAG
            n_newer = 0
            for other in table[start : start + _WAYS - 1]:
                if not other or other | _TAG == name:
                    break
                n_newer += 1
            table[start + 1 : start + 1 + n_newer] = table[start : start + n_newer]
            table[start] = name if is_evicted else name ^ 1

    def departure(self, digest: int) -> Departure | None:
        """Returns why a page that is not cached has left the cache; None if it was never cached. O(1)."""
        start = (digest >> 2) % self._n_buckets * _WAYS
        bucket = self._table[start : start + _WAYS].tolist()
        name = digest | _TAG
        if name in bucket:
            return "evicted"
        if name ^ 1 in bucket:
            return "dropped"
        return "forgotten" if bucket[-1] else None
