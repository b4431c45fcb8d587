"""The drafts of decode rows: how many a step has room for, and pages for them."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols import Drafts, Queue, Tiers
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.tree.node import TOKEN_BYTES

_MAX_SHARE = 4
"""Drafts take one part in so many of a step's tokens at most: the rest is for prompts."""


class RowDrafts:
    """Gives decode rows their drafts.

    Drafts take pages from the free list only, so that they evict and preempt nothing, and rows that no request will
    need.

    Args:
        cache: the page cache of the device.
        waiting: the waiting requests.
        tiers: the memory tiers behind the pool.
        running: the requests with pages.
        max_tokens: maximum tokens of a step.
        max_rows: maximum rows of a step, of which each draft takes one; None: drafts take none.
    """

    def __init__(
        self,
        cache: PageCache,
        waiting: Queue,
        tiers: Tiers,
        running: RunningRequests,
        max_tokens: int,
        max_rows: int | None,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._tiers = tiers
        self._running = running
        self._max_tokens = max_tokens
        self._max_rows = max_rows

    def n_most(self, n_decoding: int) -> int:
        """Returns how many drafts a step with so many decode rows may have; 0 or less: none. O(1)."""
        n_most = min(self._max_tokens // _MAX_SHARE, self._max_tokens - n_decoding - self._cache.page_size)
        if self._max_rows is not None:
            n_most = min(n_most, self._max_rows - len(self._running) - len(self._tiers) - len(self._waiting))
        return n_most

    def draft(self, drafts: Drafts, decoding: Sequence[Request]) -> list[bytes]:
        """Returns the drafts of each decoding request's next row, with pages for them.

        Costs what ``Drafts.draft`` does, and O(rows + drafts).

        Args:
            drafts: guesses the tokens that follow.
            decoding: the requests of all decode rows of the step, with a page for their next token.
        """
        if (n_most := self.n_most(len(decoding))) <= 0:
            return [b""] * len(decoding)
        found = drafts.draft(decoding, [request.max_drafts for request in decoding], n_most)
        n_promised = self._tiers.n_promised
        for index, (request, tokens) in enumerate(zip(decoding, found, strict=True)):
            if tokens:
                n_tokens = request.n_scheduled + 1 + len(tokens) // TOKEN_BYTES
                n_pages = self._cache.pages_for(n_tokens)
                if not self._cache.reserve(request.blocks, n_pages, n_left_free=n_promised):
                    n_room = len(request.blocks.pages) * self._cache.page_size - request.n_scheduled - 1
                    found[index] = tokens[: n_room * TOKEN_BYTES]
        return found
