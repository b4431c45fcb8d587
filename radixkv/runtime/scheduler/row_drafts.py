"""The drafts of decode rows: how many a step has room for, and pages for them."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.tiers import Tiers
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
        max_rows: maximum rows of a step, of which each draft takes one; None: drafts take none.
    """

    def __init__(
        self,
        cache: PageCache,
        waiting: Queue,
        tiers: Tiers,
        running: RunningRequests,
        max_rows: int | None,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._tiers = tiers
        self._running = running
        self._max_rows = max_rows

    def n_most(self, decoding: Sequence[Request], max_tokens: int) -> int:
        """Returns how many drafts a step with rows of these requests has room for; 0 or less: none.

        There is room in free pages that are not promised, and in what the requests' own last pages have left.
        O(1) if the free pages are enough, else O(requests).

        Args:
            decoding: the requests of all decode rows of the step.
            max_tokens: maximum tokens of the step.
        """
        page_size = self._cache.page_size
        n_most = min(max_tokens // _MAX_SHARE, max_tokens - len(decoding) - page_size)
        if self._max_rows is not None:
            n_most = min(n_most, self._max_rows - len(self._running) - len(self._tiers) - len(self._waiting))
        n_room = max(0, self._cache.n_free - self._tiers.n_promised) * page_size
        for request in decoding:
            if n_room >= n_most:
                return n_most
            if request.block_table is not None:
                n_pages = max(len(request.block_table.pages), request.n_scheduled // page_size + 1)
                n_room += n_pages * page_size - request.n_scheduled - 1
        return min(n_most, n_room)

    def draft(self, drafts: Drafts, decoding: Sequence[Request], max_tokens: int) -> list[bytes]:
        """Returns the drafts of each decoding request's next row, with pages for them.

        Costs what ``Drafts.draft`` does, and O(rows + drafts).

        Args:
            drafts: guesses the tokens that follow.
            decoding: the requests of all decode rows of the step, with a page for their next token.
            max_tokens: maximum tokens of the step.
        """
        if (n_most := self.n_most(decoding, max_tokens)) <= 0:
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
