"""PagedEviction of one request: which pages its answer goes on without.

Chitty-Venkata et al., "PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large Language Model
Inference" (2025). See docs/decisions/0088-paged-eviction.md for what differs here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.wire.kv_budget import most_pages
from radixkv.wire.messages import KVEvictionUse

Rank = Callable[[int, float], float]
"""Returns by what a page is kept, the highest longest, of its entry in the block table and its score."""


def by_score(entry: int, score: float) -> float:
    """Ranks pages by their scores, as the paper does."""
    return score


class PagedEviction:
    """Drops the lowest pages of one choice, so that each row of its answer reads at most ``kv_budget`` tokens.

    The prompt is computed as always. Before the first row of the answer, so many filled pages are dropped as the
    budget demands, and then one page whenever the newest one is filled. The page that was filled last always stays:
    its score may not be known yet, and what is dropped must not depend on how many steps are launched.

    Args:
        cache: the page cache of the device.
        kv_budget: the most tokens that a row reads, rounded down to pages, of which there must be two.
        rank: decides which pages are the lowest; of equal ones the first go.
        count: takes how many pages were skipped, and how many of them were freed, each time.
    """

    def __init__(
        self,
        cache: PageCache,
        kv_budget: int,
        *,
        rank: Rank = by_score,
        count: Callable[[int, int], None] = lambda n_skipped, n_freed: None,
    ) -> None:
        self._cache = cache
        self._n_most = kv_budget // cache.page_size
        self._rank = rank
        self._count = count
        self._kv_budget = kv_budget
        self._start(None)

    def _start(self, blocks: BlockTable | None) -> None:
        """Begins with a block table that skips nothing: the first one, or the one after a preemption."""
        self._blocks = blocks
        self._n_skipped = self._n_freed = 0
        self._n_asked = 0
        self._n_ranked = 0
        self._scores: deque[float] = deque()
        """Of the pages after the ``_n_ranked`` first ones."""
        self._lowest: list[tuple[float, int]] = []
        """A heap of rank and entry of the ranked pages that are not skipped."""

    @property
    def use(self) -> KVEvictionUse:
        """What it has dropped so far, since the last preemption if there was one: the same goes again then."""
        page_size = self._cache.page_size
        return KVEvictionUse(
            self._kv_budget, (self._n_skipped - self._n_freed) * page_size, self._n_freed * page_size
        )

    def pages_to_score(self, blocks: BlockTable, end: int) -> tuple[int, ...]:
        """See ``KVEviction``. Asks once the budget is nearly used up, then for each filled page once."""
        if blocks is not self._blocks:
            self._start(blocks)
        n_filled = end // self._cache.page_size
        if n_filled - len(blocks.skipped) < self._n_most - 1:
            return ()
        first, self._n_asked = self._n_asked, n_filled
        return tuple(blocks.pages[first:n_filled])

    def take_scores(self, scores: Sequence[float]) -> None:
        """See ``KVEviction``. O(scores)."""
        self._scores += scores

    def most_pages(self, n_prompt: int) -> int:
        """See ``KVEviction``. O(1)."""
        return most_pages(n_prompt, self._kv_budget, self._cache.page_size)

    def exact_end(self, n_prompt: int) -> int:
        """See ``KVEviction``. O(1)."""
        return max(n_prompt, self._n_most * self._cache.page_size)

    def row_limit(self, request: Request) -> int:
        """See ``KVEviction``. O(1)."""
        page_size, start = self._cache.page_size, request.n_scheduled
        first = self.exact_end(request.n_prompt)
        return first if start < first else start - start % page_size + page_size

    def make_room(self, request: Request) -> bool:
        """See ``KVEviction``. O(log pages) for each page that is dropped or has come since, and O(pages) if any is
        dropped."""
        blocks = request.blocks
        n_filled = request.n_scheduled // self._cache.page_size
        n_excess = n_filled + 1 - len(blocks.skipped) - self._n_most
        if n_excess <= 0:
            return True
        assert blocks.n_leased <= n_filled, "later rows would write approximate KV to pages of the tree"
        n_candidates = n_filled - 1
        if self._n_ranked + len(self._scores) < n_candidates:
            return False
        for entry in range(self._n_ranked, n_candidates):
            heappush(self._lowest, (self._rank(entry, self._scores.popleft()), entry))
        self._n_ranked = n_candidates
        entries = [heappop(self._lowest)[1] for _ in range(n_excess)]
        n_freed = self._cache.skip(blocks, entries, request.last_step)
        self._n_skipped += n_excess
        self._n_freed += n_freed
        self._count(n_excess, n_freed)
        return True
