"""The page cache: the pool's free pages and the tree; the only allocator and the only freer.

Every page is in exactly one place: free, reachable in the tree, detached but leased, or in one request's tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from time import perf_counter
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from radixkv.errors import InvariantError
from radixkv.runtime.cache.block_table import BlockTable, ReplacedPage
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.shared_runs import SharedRun

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    verb: Callable[Concatenate[PageCache, _P], _R],
) -> Callable[Concatenate[PageCache, _P], _R]:
    """Adds a verb's wall time to ``PageCache.seconds``."""

    @functools.wraps(verb)
    def timed(self: PageCache, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        begun = perf_counter()
        try:
            return verb(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - begun

    return timed


class ComputedRow(NamedTuple):
    """What a row that is done and finite has covered: a request's tokens up to ``n_tokens``."""

    blocks: BlockTable
    tokens: bytearray
    n_tokens: int
    last_read: int
    """The newest step that may still read the table as it is."""


class PageCache:
    """Hands out pages, shares them by prefix, and takes them back.

    Args:
        n_pages: pages in the pool.
        page_size: tokens a page.
        shares: whether prompts share pages; False makes every blocks private.
        clock: the tree's, by which it evicts; None evicts what was used least recently.
    """

    def __init__(
        self, n_pages: int, page_size: int, *, shares: bool = True, clock: Callable[[], int] | None = None
    ) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        self.shares = shares
        self.tree = RadixTree(page_size, clock=clock)
        self.seconds = 0.0
        """Wall time spent in here since the start."""
        self.n_evicted = 0
        """Pages evicted since the start."""
        self._free = list(range(n_pages - 1, -1, -1))
        self._least_evicted = n_pages >> 8
        """Pages that go together: one by one each would take several times as long, and of a large pool nobody
        misses so few."""
        self._n_held = 0

    @property
    def n_free(self) -> int:
        """Pages that nobody uses. O(1)."""
        return len(self._free)

    @property
    def n_available(self) -> int:
        """Pages that can be had at once: free, or evictable. O(1)."""
        return len(self._free) + self.tree.n_pages_evictable

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-n_tokens // self.page_size)

    @_timed
    def matches(self, prompts: Iterable[tuple[Namespace, bytes]]) -> list[int]:
        """The cached prefix of each prompt, in tokens; changes nothing. O(edges) a prompt."""
        if not self.shares:
            return [0 for _ in prompts]
        match = self.tree.match
        return [match(namespace, tokens) for namespace, tokens in prompts]

    @_timed
    def open(
        self, namespace: Namespace, tokens: bytes, reads: bool = True, bypasses_tree: bool = False
    ) -> BlockTable:
        """A blocks that leases the longest cached prefix. O(pages leased).

        Args:
            reads: False leases nothing yet; commits still share.
            private: neither reads nor fills the tree.
        """
        if bypasses_tree or not self.shares:
            return BlockTable(None, [], 0)
        lease = self.tree.lease(namespace, tokens if reads else b"")
        table = self.tree.pages(lease)
        return BlockTable(lease, table, len(table))

    @_timed
    def extend(self, blocks: BlockTable, tokens: bytearray) -> None:
        """Leases what others have committed behind the lease's end; only while there is no tail.

        O(new edges + new pages), and one copy of the tokens behind the lease.
        """
        if blocks.lease is None or len(blocks.pages) > blocks.n_leased:
            return
        following = bytes(memoryview(tokens)[blocks.n_leased * self.page_size * TOKEN_BYTES :])
        blocks.pages += self.tree.extend(blocks.lease, following)
        blocks.n_leased = len(blocks.pages)

    @_timed
    def reserve(self, blocks: BlockTable, n_pages: int) -> bool:
        """Lets the table have at least ``n_pages``, evicting as needed; False and no change if it cannot.

        O(new pages), and O(log leaves) a leaf evicted.
        """
        n_missing = n_pages - len(blocks.pages)
        if n_missing > self.n_available:
            return False
        if n_missing > 0:
            self._allocate(blocks, n_missing)
        return True

    @_timed
    def append_pages(self, block_tables: Sequence[BlockTable]) -> bool:
        """Lets each table have one page more, evicting as needed; False and no change if it cannot.

        O(block_tables), and O(log leaves) a leaf evicted.
        """
        if len(block_tables) > self.n_available:
            return False
        self._evict_if_short(len(block_tables))
        for blocks in block_tables:
            blocks.pages.append(self._free.pop())
        self._n_held += len(block_tables)
        return True

    @_timed
    def fork(self, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        """A second blocks of the first ``n_tokens``: the lease pinned once more, and copies of the tail's pages.

        The new blocks's ``copies`` go into the plan of its first row. Until that step is done the pages of
        ``blocks`` must not be given back. O(edges + pages), and O(log leaves) a leaf evicted.

        Args:
            n_tokens: no fewer than the lease's pages but the last hold.
            n_pages: pages of the new table; there must be room for those that are not leased.
        """
        lease = None if blocks.lease is None else self.tree.fork(blocks.lease)
        first, last = blocks.n_leased, self.pages_for(n_tokens)
        second = BlockTable(lease, blocks.pages[:first], first)
        if n_pages > first:
            self._allocate(second, n_pages - first)
        second.copies = list(zip(blocks.pages[first:last], second.pages[first:last], strict=True))
        return second

    @_timed
    def commit(self, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        """Gives the tail's pages up to ``n_tokens`` to the tree. O(new pages) amortised.

        Where the tree has the same tokens already, the table is pointed at the tree's pages first, and its own
        duplicates are retired until step ``last_read``, the newest that may still read them, is done.

        Returns:
            Pages, from the table's start, that were in the tree before this call: their KV must not be written.
        """
        return self._commit(blocks, tokens, n_tokens, last_read)

    @_timed
    def mark_computed(self, blocks: BlockTable, n_tokens: int, step: int) -> None:
        """A row of ``step`` is done and finite up to ``n_tokens``: the pages that it read may be relied on.

        A row that knew the table from before duplicates left it has not read the tree's pages in their place.
        O(unsettled edges + retired).
        """
        self._mark_computed(blocks, n_tokens, step)

    @_timed
    def commit_computed(self, rows: Iterable[ComputedRow], step: int) -> None:
        """Rows of ``step`` are done and finite: ``commit`` of the pages that they have filled, and ``mark_computed``."""
        for blocks, tokens, n_tokens, last_read in rows:
            self._commit(blocks, tokens, n_tokens, last_read)
            self._mark_computed(blocks, n_tokens, step)

    @_timed
    def free_replaced(self, blocks: BlockTable, step: int) -> None:
        """Frees the retired duplicates that no step after ``step`` reads. O(retired)."""
        done = [retired.page for retired in blocks.replaced if retired.last_read <= step]
        blocks.replaced = [retired for retired in blocks.replaced if retired.last_read > step]
        self._free += done
        self._n_held -= len(done)

    @_timed
    def detach_uncomputed(self, blocks: BlockTable) -> Node | None:
        """Makes the blocks's path unreachable from the first page that no finite row has covered. O(subtree).

        Returns:
            The node that begins with that page, also if it was detached before; None if all are covered.
        """
        if blocks.lease is None:
            return None
        self._free += self.tree.detach_uncomputed(blocks.lease)
        return self.tree.first_uncomputed(blocks.lease)

    @_timed
    def leads_through(self, blocks: BlockTable, nodes: AbstractSet[Node]) -> bool:
        """Whether the blocks's path has one of the nodes. O(edges)."""
        return blocks.lease is not None and self.tree.leads_through(blocks.lease, nodes)

    @_timed
    def shared_runs(self, leases: Sequence[Lease | None]) -> list[SharedRun]:
        """Which of the leases hold the same pages. O(edges)."""
        return self.tree.shared_runs(leases)

    @_timed
    def close(self, blocks: BlockTable) -> None:
        """Releases the lease and frees the tail; no launched step may still use them. O(pages)."""
        tail = _unshared(blocks)
        if blocks.lease is not None:
            self._free += self.tree.release(blocks.lease)
        self._free += tail
        self._n_held -= len(tail)
        blocks.pages = []
        blocks.replaced = []
        blocks.n_leased = 0

    @_timed
    def flush(self) -> tuple[int, int]:
        """Makes everything cached unreachable. O(nodes · log leaves + pages freed).

        Returns:
            Pages freed, and pages that requests still hold and that go with them.
        """
        n_before = self.n_free
        for namespace in self.tree.namespaces():
            self._free += self.tree.detach(namespace)
        return self.n_free - n_before, self.tree.n_pages_detached

    def check_counts(self) -> None:
        """Free + reachable + detached + held is the pool, and the tree's own counts can be. O(1).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.tree.check(deep=False)
        total = self.n_free + self.tree.n_pages_reachable + self.tree.n_pages_detached + self._n_held
        if total != self.n_pages:
            raise InvariantError(
                f"{self.n_free} free, {self.tree.n_pages_reachable} reachable, {self.tree.n_pages_detached} "
                f"detached and {self._n_held} held pages do not add up to the pool's {self.n_pages}"
            )

    def check(self, block_tables: Iterable[BlockTable]) -> None:
        """Every page is in exactly one place, and every table is lease + tail. O(pages + length of all tables).

        Args:
            block_tables: all that are open.

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.tree.check()
        self.check_counts()
        owners: dict[int, str] = {}
        _claim(owners, "the free list", self._free)
        _claim(owners, "the tree", self.tree.reachable_pages())
        _claim(owners, "a detached path", self.tree.detached_pages())
        n_held = 0
        for number, blocks in enumerate(block_tables):
            tail = _unshared(blocks)
            _claim(owners, f"blocks {number}", tail)
            n_held += len(tail)
            leased = [] if blocks.lease is None else self.tree.pages(blocks.lease)
            if blocks.pages[: blocks.n_leased] != leased:
                raise InvariantError(
                    f"the table of blocks {number} starts {blocks.pages[: blocks.n_leased]}, "
                    f"its lease holds {leased}"
                )
        if n_held != self._n_held:
            raise InvariantError(f"{n_held} pages are in tails, {self._n_held} were counted")
        if owners.keys() != set(range(self.n_pages)):
            raise InvariantError(f"pages without an owner: {sorted(set(range(self.n_pages)) - owners.keys())[:8]}")

    def free_pages(self) -> Iterator[int]:
        """The free pages. O(free)."""
        return iter(self._free)

    def _commit(self, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_read: int) -> int:
        first, last = blocks.n_leased, n_tokens // self.page_size
        lease = blocks.lease
        if lease is None or last <= first:
            return first
        page_bytes = self.page_size * TOKEN_BYTES
        pages = blocks.pages[first:last]
        canonical = self.tree.commit(lease, tokens[first * page_bytes : last * page_bytes], pages)
        if canonical:
            n_duplicates = len(canonical)
            blocks.pages[first : first + n_duplicates] = canonical
            blocks.n_on_device = min(blocks.n_on_device, first)
            blocks.replaced += [
                ReplacedPage(last_read, first + i, page) for i, page in enumerate(pages[:n_duplicates])
            ]
        blocks.n_leased = lease.n_tokens // self.page_size
        self._n_held -= blocks.n_leased - first - len(canonical)
        return first + len(canonical)

    def _mark_computed(self, blocks: BlockTable, n_tokens: int, step: int) -> None:
        if blocks.lease is None:
            return
        if blocks.replaced:
            replaced = min((r.entry for r in blocks.replaced if r.last_read >= step), default=blocks.n_leased)
            n_tokens = min(n_tokens, replaced * self.page_size)
        self.tree.mark_computed(blocks.lease, n_tokens)

    def _evict_if_short(self, n_pages: int) -> None:
        n_short = n_pages - len(self._free)
        if n_short > 0:
            for run in self.tree.evict(max(n_short, self._least_evicted)):
                self.n_evicted += len(run.pages)
                self._free += run.pages
        assert len(self._free) >= n_pages, "the tree evicts as many pages as it calls evictable"

    def _allocate(self, blocks: BlockTable, n_missing: int) -> None:
        self._evict_if_short(n_missing)
        blocks.pages += self._free[-n_missing:]
        del self._free[-n_missing:]
        self._n_held += n_missing


def _unshared(blocks: BlockTable) -> list[int]:
    return blocks.pages[blocks.n_leased :] + [retired.page for retired in blocks.replaced]


def _claim(owners: dict[int, str], owner: str, pages: Iterable[int]) -> None:
    for page in pages:
        if page in owners:
            raise InvariantError(f"page {page} is owned by {owners[page]} and by {owner}")
        owners[page] = owner
