"""Page cache: the allocator of a pool's pages, which shares them through the radix tree.

No other module allocates or frees a page. Every page is in exactly one of four places: on the free list, reachable
in the tree, detached from the tree but leased, or private to one block table (its tail and replaced duplicates).
Where layers with windows have pages of their own, a window page may be in the place of pages: ``window_pages``.
Each pool has a page cache of its own: the device's KV pool, and the slots in host memory behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from time import monotonic

from radixkv.runtime.cache.block_table import BlockTable, ComputedRow, ReplacedPage
from radixkv.runtime.cache.checks import check_counts, check_pages
from radixkv.runtime.cache.free_pages import FreePages
from radixkv.runtime.cache.page_quotas import PageQuotas
from radixkv.runtime.cache.window_allocator import NoWindowPages, WindowAllocator
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.cache.window_table import WindowTable
from radixkv.runtime.cache.windows import Windows
from radixkv.tree.eviction_policies import EvictionPolicy
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node, State
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.spared import WaitingPrompt
from radixkv.tree.states import BLOCK_TOKENS

MIN_COPIED_TOKENS = 4
"""Fewest tokens for which a part of a page is copied. Finding and leasing the page takes the host about as long as
a GPU takes to compute one token or two, and prompts with nothing else in common share the first token."""
_NO_STEP = -1
"""Less than every step's number: no step has used the page."""


class PageCache:
    """Allocates pages to requests, shares cached prefixes between them, evicts, and frees.

    The methods in the order in which a request uses them: ``open`` leases the cached prefix, ``reserve`` allocates
    the rest, ``commit`` adds filled pages to the tree, ``mark_computed`` lets them stay cached once their KV is
    computed, and ``close`` frees what does not stay.

    Args:
        n_pages: pages in the pool; ``add_pages`` adds to them.
        page_size: tokens per page.
        is_sharing: whether requests share pages; False bypasses the tree for every request.
        window: the most positions that a token attends to in any layer, its own included; None if a layer has no
            window. Requests without a lease then free pages while they run, see ``free_behind``.
        policy: decides which pages are evicted; a new object for each cache. None: the least recently used.
        page_quotas: divide the pages among their owners; a new object for each cache. None: nothing is divided.
        min_copied_tokens: fewest tokens for which a part of a page is copied, at least 1; with ``page_size`` only
            whole pages are shared.
        n_states: how many states of recurrent layers, or tails of window pages, the tree can have. Requests then
            go on from a state only, and no part of a page is copied. None: the model needs none.
        state_block_tokens: positions of states are multiples of it.
        window_pages: the pages of layers with windows; None: all layers are in all pages.
        free_pages: the free pages of the pool, all of them: tests give a list that sees every freed page. None
            takes those of ``window_pages``.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        *,
        is_sharing: bool = True,
        window: int | None = None,
        policy: EvictionPolicy | None = None,
        page_quotas: PageQuotas | None = None,
        min_copied_tokens: int = MIN_COPIED_TOKENS,
        n_states: int | None = None,
        state_block_tokens: int = BLOCK_TOKENS,
        window_pages: WindowPages | None = None,
        free_pages: FreePages | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        self.is_sharing = is_sharing
        self.windows = Windows(page_size, window)
        self.min_copied_tokens = min_copied_tokens if n_states is None else page_size
        self.page_quotas = page_quotas or PageQuotas()
        self.tree = RadixTree(
            page_size,
            policy=policy,
            groups=self.page_quotas.names,
            n_states=n_states,
            state_block_tokens=state_block_tokens,
            clock=clock,
        )
        self.page_quotas.open(self.tree, n_pages)
        self.n_evicted = 0
        """Pages evicted since the creation of the cache."""
        self.upcoming_prompts: Callable[[], Iterable[WaitingPrompt]] = tuple
        """Returns the prompts that will be opened soon, in order. Their cached pages are evicted only after pages
        that none of them needs.

        The scheduler sets it: its queue ranks requests by this cache, and so is made after it."""
        self.expected_prompts: Callable[[], Iterable[WaitingPrompt]] = tuple
        """Returns the prompts that may be opened some time, in order, though no request with them waits.

        Their pages are evicted before those of ``upcoming_prompts``, and after all others."""
        self.window_pages: WindowAllocator = NoWindowPages()
        """The pages of layers with windows, where these have pages of their own."""
        self.recurrent_states = self.tree.states
        """The states of recurrent layers, which no page holds; None if the model has no such layers."""
        if window_pages is not None:
            window_pages.watch(self.tree.states)
            self.window_pages, self.recurrent_states = window_pages, None
        self._free = self.window_pages.free_pages(n_pages) if free_pages is None else free_pages
        self._n_private = 0
        """Pages in tails and replaced duplicates."""

    @property
    def n_free(self) -> int:
        """Pages on the free list. O(1)."""
        return len(self._free)

    @property
    def n_available(self) -> int:
        """Pages that can be allocated now: free or evictable, alone or in the place of tails. O(1)."""
        return len(self._free) + self.tree.n_pages_evictable + self.window_pages.n_pages_evictable

    def n_available_to(self, namespace: Namespace) -> int:
        """Returns how many pages the namespace's owner can get now. Costs what ``PageQuotas.n_available`` does."""
        return self.page_quotas.n_available(namespace, self.n_available)

    def add_pages(self, pages: range) -> None:
        """Adds pages to the pool, whose indices continue those that it has. O(new pages)."""
        assert pages.start == self.n_pages, "new pages continue the pool's"
        self.n_pages = pages.stop
        self._free += reversed(pages)
        self.page_quotas.resize(self.n_pages)

    def pages_for(self, n_tokens: int) -> int:
        """Returns the number of pages that ``n_tokens`` tokens need."""
        return -(-n_tokens // self.page_size)

    def n_missing(self, blocks: BlockTable, n_tokens: int, max_row_tokens: int) -> int:
        """Returns how many pages a request lacks to compute ``n_tokens`` tokens in rows of ``max_row_tokens``, with
        those in whose place its window pages will be. O(1)."""
        n_pages = self.pages_for(n_tokens)
        n_lost = self.window_pages.n_pages_missing(blocks.window, n_pages, max_row_tokens)
        return n_pages - len(blocks.pages) + n_lost

    def matches(self, prompts: Iterable[tuple[Namespace, bytes]]) -> list[int]:
        """Returns the length of each prompt's cached prefix, in tokens. Changes nothing. O(edges) a prompt."""
        if not self.is_sharing:
            return [0 for _ in prompts]
        match = self.tree.match
        return [match(namespace, tokens) for namespace, tokens in prompts]

    def open(
        self,
        namespace: Namespace,
        tokens: bytes,
        reads: bool = True,
        bypasses_tree: bool = False,
        is_use: bool = True,
        is_hit: bool = True,
        needs_state: bool = True,
    ) -> BlockTable:
        """Returns a block table that leases the longest cached prefix of the tokens.

        O(pages leased), and ``RadixTree.extend``.

        Args:
            namespace: namespace of the request.
            tokens: the tokens to look up.
            reads: False leases nothing, so that every token is computed; commits still add to the tree.
            bypasses_tree: True makes all pages private; the request neither reads from the tree nor adds to it.
            is_use: False leaves the order of eviction as it is.
            is_hit: False for pages that are found for a copy, and not for a request, or for a request that may not
                start: see ``count_hit``.
            needs_state: False also leases pages without a state of recurrent layers, for a copy that brings one.
        """
        if bypasses_tree or not self.is_sharing:
            return BlockTable(None, [], 0, namespace=namespace)
        lease = self.tree.open_lease(namespace, is_use=is_use, is_hit=is_hit)
        pages = self.tree.extend(lease, tokens, needs_state=needs_state) if reads else []
        state = lease.node.state if pages and needs_state else None
        blocks = BlockTable(lease, pages, len(pages), namespace=namespace, window=WindowTable(len(pages)))
        if state is not None:
            self.go_on_from(blocks, state)
        return blocks

    def go_on_from(self, blocks: BlockTable, state: State) -> None:
        """Lets the first row of a block table go on from a state of the tree, which keeps its slot until the table
        gives it up. The table has no window pages, and gets those of a tail. O(1), or O(pages of a tail)."""
        blocks.state = state
        if self.recurrent_states is not None:
            self.recurrent_states.hold(state)
        else:
            blocks.window = self.window_pages.open(state)

    def count_hit(self, blocks: BlockTable) -> None:
        """Counts a hit of the leased pages, for a table that was opened without one. Costs as
        ``RadixTree.count_hit``."""
        if blocks.lease is not None:
            self.tree.count_hit(blocks.lease)

    def extend(self, blocks: BlockTable, tokens: bytearray) -> None:
        """Extends the lease over pages that other requests have committed since.

        Does nothing if there is a tail, or entries are skipped; nor in a model with states, because the request
        goes on from its own.

        ``RadixTree.extend``, and one copy of the tokens after the lease.

        Args:
            blocks: the block table to extend.
            tokens: all tokens of the request.
        """
        if blocks.lease is None or len(blocks.pages) > blocks.n_leased or self.tree.states is not None:
            return
        if blocks.skipped:
            return
        following = bytes(memoryview(tokens)[blocks.n_leased * self.page_size * TOKEN_BYTES :])
        blocks.pages += self.tree.extend(blocks.lease, following)
        blocks.n_leased = len(blocks.pages)

    def copy_partial_page(self, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> int:
        """Looks for a cached page that begins like the first page of the tail, and has it copied to that page.

        The plan of the request's next row must carry the block table's ``copies``, and keep its ``source`` until
        the step is done. The tail must have a page, and no row may have written to it. The time is that of
        ``RadixTree.lease_partial_page``.

        Args:
            blocks: the block table.
            tokens: all tokens of the request.
            n_tokens: known tokens of which the KV may be copied: not the last one.

        Returns:
            The number of tokens whose KV the copy brings, 0 without a copy. They need not be computed.
        """
        if blocks.lease is None:
            return 0
        first = blocks.n_leased * self.page_size
        page = bytes(tokens[first * TOKEN_BYTES : (first + self.page_size) * TOKEN_BYTES])
        partial = self.tree.lease_partial_page(
            blocks.lease, page, min_tokens=self.min_copied_tokens, max_tokens=n_tokens - first
        )
        if partial is None:
            return 0
        blocks.copies = [(partial.page, blocks.pages[blocks.n_leased])]
        blocks.source = partial.lease
        return partial.n_tokens

    def release_sources(self, sources: Iterable[Lease]) -> None:
        """Lets go of pages whose copies are done, or were undone. O(edges + log leaves) each."""
        for source in sources:
            self._give_back(source.namespace, self.tree.release(source))

    def reserve(self, blocks: BlockTable, n_pages: int, *, n_left_free: int | None = None) -> bool:
        """Grows a block table to at least ``n_pages`` pages. If too few are free, evicts 1/128 of the pool or more.

        O(new pages), and O(log leaves) a leaf evicted.

        Args:
            blocks: the block table to grow.
            n_pages: its length afterwards, at least.
            n_left_free: evicts nothing, and leaves so many pages on the free list; None: any page may be taken.

        Returns:
            False, without any change, if there are too few free and evictable pages for its owner.
        """
        n_missing = n_pages - len(blocks.pages)
        if n_missing > 0:
            if n_missing > self.n_available_to(blocks.namespace):
                return False
            if not self.window_pages.make_room(self, n_missing, n_missing, n_left_free=n_left_free):
                return False
            if n_left_free is not None and (
                n_missing + n_left_free > len(self._free)
                or self.page_quotas.n_over_cap(blocks.namespace, n_missing) > 0
            ):
                return False
            self._allocate(blocks, n_missing)
        return True

    def reserve_copied(self, blocks: BlockTable, n_pages: int) -> bool:
        """Does what ``reserve`` does for pages that a copy fills: window pages are those of its tails, see
        ``WindowPages.reserve_tail``. The block table has none."""
        n_missing = n_pages - len(blocks.pages)
        if n_missing > 0:
            if n_missing > self.n_available_to(blocks.namespace):
                return False
            self._take(blocks, n_missing)
        blocks.window = WindowTable(len(blocks.pages))
        return True

    def reserve_unneeded(self, blocks: BlockTable, n_pages: int, ahead_of: bytes | None = None) -> bool:
        """Does what ``reserve_copied`` does with pages that nobody needs: free ones, and evicted ones that no
        upcoming prompt needs and that are not retained.

        Args:
            blocks: the block table.
            n_pages: how many pages it is to have.
            ahead_of: the tokens of which the pages are. If they are one of ``expected_prompts``, pages stay that
                those before it need, and pages of later ones may go.

        Returns:
            False, with the block table as it was, if there are too few.
        """
        n_missing, quotas = n_pages - len(blocks.pages), self.page_quotas
        if n_missing > self.n_available_to(blocks.namespace) or quotas.n_over_cap(blocks.namespace, n_missing) > 0:
            return False
        if (n_short := n_missing - len(self._free)) > 0:
            n_most = self.n_pages >> 7
            expected = [*self.expected_prompts()]
            place = next((place for place, (_, tokens) in enumerate(expected) if tokens is ahead_of), 0)
            self._evict(
                max(n_short, n_most),
                quotas.quotas(blocks.namespace),
                n_required=0,
                n_beyond=n_most,
                first=expected[:place],
            )
        return n_missing <= len(self._free) and self.reserve_copied(blocks, n_pages)

    def n_missing_beside(self, blocks: BlockTable, n_copied: int, n_pages: int, max_row_tokens: int) -> int:
        """Returns what ``n_missing`` would for ``n_pages`` pages, if a copy is to bring the first ``n_copied`` and
        the tail before their end. O(1)."""
        windows = self.window_pages
        n_lost = windows.n_pages_missing(windows.before(n_copied * self.page_size), n_pages, max_row_tokens)
        return n_pages - len(blocks.pages) + n_lost

    def evict_unneeded(self, namespace: Namespace, n_pages: int) -> int:
        """Evicts pages that no upcoming prompt needs, until ``n_pages`` are free for the namespace's owner or no
        such page is left.

        O(log leaves) a leaf evicted.

        Returns:
            How many of these pages ``reserve`` gets without the eviction of what an upcoming prompt needs.
        """
        n_pages = min(n_pages, self.n_available_to(namespace))
        if n_pages <= 0:
            return 0
        self._make_free(namespace, n_pages, spares_waiting=True)
        return min(n_pages - self.page_quotas.n_over_cap(namespace, n_pages), len(self._free))

    def append_pages(self, block_tables: Sequence[BlockTable]) -> bool:
        """Adds one page to each of the block tables. If too few are free, evicts 1/128 of the pool or more.

        O(block tables), and O(log leaves) a leaf evicted.

        Returns:
            False, without any change, if there are too few free and evictable pages for their owners.
        """
        if not block_tables:
            return True
        if not self.page_quotas.have_room(block_tables, self.n_available):
            return False
        if self.page_quotas.names:
            for blocks in block_tables:
                self._allocate(blocks, 1)
            return True
        n_missing = len(block_tables)
        if not self.window_pages.make_room(self, n_missing, n_missing):
            return False
        for blocks in block_tables:
            self.window_pages.grow(blocks.window, 1)
        self._make_free(block_tables[0].namespace, n_missing)
        for blocks, page in zip(block_tables, reversed(self._free.take(n_missing)), strict=True):
            blocks.pages.append(page)
        self._n_private += n_missing
        return True

    def fork(self, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        """Returns a second block table of the first ``n_tokens``: the same leased pages, and new ones for the tail.

        The plan of the fork's first row must carry the new table's ``copies``, which copy the tail. Until that step
        is done, the pages of ``blocks`` must not be freed. O(edges + pages), and O(log leaves) a leaf evicted. See
        docs/decisions/0006-forks.md.

        Args:
            blocks: the block table to fork.
            n_tokens: tokens to share; they end within the last leased page, or after it.
            n_pages: length of the new block table. The pages beyond the leased ones must be available, also for
                windows: ``can_fork``.
        """
        lease = None if blocks.lease is None else self.tree.fork(blocks.lease)
        first, last = self.windows.first_copied(blocks, n_tokens), self.pages_for(n_tokens)
        second = BlockTable(
            lease,
            blocks.pages[:first],
            blocks.n_leased,
            first - blocks.n_leased,
            namespace=blocks.namespace,
            window=self.window_pages.fork(blocks.window, n_tokens),
        )
        self.window_pages.grow(second.window, n_pages - second.window.end)
        if n_pages > first:
            self._take(second, n_pages - first)
        second.copies = list(zip(blocks.pages[first:last], second.pages[first:last], strict=True))
        return second

    def can_fork(self, blocks: BlockTable, n_tokens: int, n_pages: int, n_room: int) -> bool:
        """Returns whether ``fork`` with these arguments has the pages that it takes, of ``n_room``. Evicts what
        window pages need. O(1), and O(log leaves) a leaf evicted."""
        n_missing = n_pages - self.windows.first_copied(blocks, n_tokens)
        n_windows = n_pages - n_tokens // self.page_size
        n_lost = self.window_pages.n_pages_lost(n_windows)
        return n_missing + n_lost <= n_room and self.window_pages.make_room(self, n_missing, n_windows)

    def is_behind(self, blocks: BlockTable, n_tokens: int) -> bool:
        """Returns whether ``free_behind`` would free pages. O(1)."""
        if self.window_pages.is_behind(blocks.window, n_tokens):
            return True
        return self.windows.n_behind(blocks, n_tokens) > blocks.n_freed

    def free_behind(self, blocks: BlockTable, n_tokens: int) -> None:
        """Frees the pages that lie behind every layer's window for rows from position ``n_tokens`` on, and window
        pages that lie behind the window.

        No launched step may have a row that starts before, and no fork may still copy the pages. With a lease only
        window pages go: pages of the tree stay for others. O(pages freed). See docs/decisions/0040-windows.md.
        """
        self.window_pages.free_behind(blocks.window, n_tokens)
        last = self.windows.n_behind(blocks, n_tokens)
        if last > blocks.n_freed:
            self._give_back(blocks.namespace, blocks.pages[blocks.n_freed : last])
            self._n_private -= last - blocks.n_freed
            blocks.n_freed = last

    def commit(self, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
        """Moves the filled pages of the tail, up to ``n_tokens``, into the tree. O(new pages) amortised.

        If the tree has pages of the same tokens already, they replace the request's own pages in the block table;
        the duplicates wait in ``replaced`` until ``free_replaced``. Nothing moves without a lease, with a detached
        one, or where entries are skipped.

        Args:
            blocks: the request's block table.
            tokens: all tokens of the request.
            n_tokens: tokens to commit; a last page that they do not fill stays in the tail.
            last_step: the newest launched step with a row of the request, which may still read the duplicates.

        Returns:
            The number of leading pages that were in the tree before this call. Their KV must not be written.
        """
        first, last = blocks.n_leased, n_tokens // self.page_size
        lease = blocks.lease
        if lease is None or last <= first or blocks.skipped:
            return first
        page_bytes = self.page_size * TOKEN_BYTES
        pages = blocks.pages[first:last]
        canonical = self.tree.commit(lease, tokens[first * page_bytes : last * page_bytes], pages)
        if canonical:
            n_duplicates = len(canonical)
            blocks.pages[first : first + n_duplicates] = canonical
            blocks.n_on_device = min(blocks.n_on_device, first)
            blocks.replaced += [
                ReplacedPage(last_step, first + i, page) for i, page in enumerate(pages[:n_duplicates])
            ]
        blocks.n_leased = lease.n_tokens // self.page_size
        self._n_private -= blocks.n_leased - first - len(canonical)
        return first + len(canonical)

    def skip(self, blocks: BlockTable, entries: Sequence[int], last_step: int) -> int:
        """Lets the next rows of a block table skip pages: they read the others alone, at the positions of these.

        From now on nothing of the table is committed: what its rows compute depends on what they have skipped.
        Pages of the tail wait in ``replaced`` until ``free_replaced``; those of the tree stay leased.

        O(pages). See docs/decisions/0088-paged-eviction.md.

        Args:
            blocks: the block table, which nobody forks.
            entries: entries of filled pages that are not skipped yet.
            last_step: the newest launched step with a row of the request, which may still read the pages.

        Returns:
            The number of pages that will be freed.
        """
        own = [entry for entry in entries if entry >= blocks.n_leased]
        blocks.replaced += [ReplacedPage(last_step, one, blocks.pages[one], is_duplicate=False) for one in own]
        blocks.skip(entries)
        return len(own)

    def mark_computed(self, blocks: BlockTable, n_tokens: int, step: int) -> None:
        """Marks the pages of the first ``n_tokens`` tokens as computed, after a row of ``step`` was finite.

        Stops at the first entry that was replaced after the launch of ``step``: the row has read the duplicate,
        which says nothing about the tree's page. O(edges not computed before + replaced pages).
        """
        if blocks.lease is None:
            return
        if blocks.replaced:
            first_replaced = min((r.entry for r in blocks.replaced if r.last_step >= step), default=blocks.n_leased)
            n_tokens = min(n_tokens, first_replaced * self.page_size)
        self.tree.mark_computed(blocks.lease, n_tokens)

    def commit_computed(self, rows: Iterable[ComputedRow], step: int) -> None:
        """Does ``commit`` and ``mark_computed``, at their cost, for finished rows of ``step`` that were finite."""
        page_size, page_bytes = self.page_size, self.page_size * TOKEN_BYTES
        for blocks, tokens, n_tokens, last_step in rows:
            first, last, lease = blocks.n_leased, n_tokens // page_size, blocks.lease
            if last == first + 1 and lease is not None and not (blocks.replaced or blocks.skipped):
                page_tokens = tokens[first * page_bytes : last * page_bytes]
                if self.tree.commit_computed_page(lease, page_tokens, blocks.pages[first]):
                    blocks.n_leased = last
                    self._n_private -= 1
                    continue
            self.commit(blocks, tokens, n_tokens, last_step)
            self.mark_computed(blocks, n_tokens, step)

    def commit_copied(self, blocks: BlockTable, tokens: bytearray, n_tokens: int) -> None:
        """Moves pages of the tail that were copied from another tier into the tree, up to ``n_tokens``.

        No step has used them. They count as computed if the pages before them do. Otherwise a finished row must
        first show that those are right. Frees the duplicates of pages that the tree has by now. Does nothing if the
        lease is detached. O(new pages).
        """
        was_computed = blocks.is_computed
        self.commit(blocks, tokens, n_tokens, last_step=_NO_STEP)
        if was_computed:
            self.mark_computed(blocks, n_tokens, _NO_STEP)
        self.free_replaced(blocks, _NO_STEP)

    def free_replaced(self, blocks: BlockTable, step: int) -> None:
        """Frees the replaced pages that no step after ``step`` reads. O(replaced pages)."""
        freed = [replaced.page for replaced in blocks.replaced if replaced.last_step <= step]
        blocks.replaced = [replaced for replaced in blocks.replaced if replaced.last_step > step]
        self._give_back(blocks.namespace, freed)
        self._n_private -= len(freed)

    def detach_uncomputed(self, blocks: BlockTable) -> Node | None:
        """Detaches the leased path from its first page that is not computed, with the subtree below it. O(subtree).

        Returns:
            The node that starts with that page, also if it was detached before; None if all leased pages are
            computed.
        """
        if blocks.lease is None:
            return None
        self._give_back(blocks.namespace, self.tree.detach_uncomputed(blocks.lease))
        return self.tree.first_uncomputed(blocks.lease)

    def close(self, blocks: BlockTable) -> None:
        """Releases the lease and frees the private pages. No launched step may still use them. O(pages)."""
        private = blocks.private_pages
        if blocks.lease is not None:
            self._give_back(blocks.namespace, self.tree.release(blocks.lease))
        self._give_back(blocks.namespace, private)
        self._n_private -= len(private)
        self.window_pages.close(blocks.window)
        if blocks.state is not None and self.recurrent_states is not None:
            self.recurrent_states.let_go(blocks.state)
        blocks.state = None
        blocks.pages = []
        blocks.replaced = []
        blocks.skipped = []
        blocks.n_leased = 0
        blocks.n_freed = 0

    def flush(self) -> tuple[int, int]:
        """Detaches everything that is cached. O(nodes · log leaves + pages freed).

        Returns:
            The number of pages freed now, and of detached pages that are freed when their requests end.
        """
        n_before = self.n_free
        for namespace in self.tree.namespaces():
            self._give_back(namespace, self.tree.detach(namespace))
        return self.n_free - n_before, self.tree.n_pages_detached

    def invalidate(self, namespace: Namespace, tokens: bytes) -> tuple[int, int]:
        """Detaches every sequence that begins with ``tokens``, by ``RadixTree.detach``.

        Returns:
            The number of pages that can be found no more, and how many of them block tables still hold.
        """
        n_reachable, n_detached = self.tree.n_pages_reachable, self.tree.n_pages_detached
        self._give_back(namespace, self.tree.detach(namespace, tokens))
        return n_reachable - self.tree.n_pages_reachable, self.tree.n_pages_detached - n_detached

    def check_counts(self) -> None:
        """Checks that free, reachable, detached and private pages add up to the pool. O(1).

        Raises:
            InvariantError: a bug in radixkv.
        """
        check_counts(self, self._n_private)

    def check(self, block_tables: Iterable[BlockTable]) -> None:
        """Checks that every page is in exactly one place, and that every block table starts with its leased pages.

        O(pages + length of all block tables).

        Args:
            block_tables: all open block tables.

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.tree.check()
        self.check_counts()
        self.page_quotas.check(check_pages(self, self._free, self._n_private, block_tables))

    def evict_leaves(self, n_pages: int, *, spares_waiting: bool = False) -> None:
        """Evicts ``n_pages`` cached pages that no request holds, of any owner, or 1/128 of the pool; fewer if there
        are no more, or if the others are spared because an upcoming prompt needs them. O(log leaves) a leaf
        evicted."""
        self._evict(max(n_pages, self.n_pages >> 7), None, n_required=0 if spares_waiting else n_pages)

    def _make_free(self, namespace: Namespace, n_pages: int, *, spares_waiting: bool = False) -> None:
        """Evicts until ``n_pages`` pages are free for the namespace's owner, who may have so many."""
        if n_over := self.page_quotas.n_over_cap(namespace, n_pages):
            self._evict(n_over, {namespace.group: n_over}, n_required=0 if spares_waiting else n_over)
        n_short = n_pages - len(self._free)
        if n_short > 0:
            # Evicting pages one by one takes several times as long, and losing 1/128 of the pages hardly matters.
            quotas = self.page_quotas.quotas(namespace)
            n_most = self.n_pages >> 7
            n_required = 0 if spares_waiting else n_short
            self._evict(max(n_short, n_most), quotas, n_beyond=n_most, n_required=n_required)
        while len(self._free) < n_pages and self.window_pages.evict_tail():
            pass
        has_room = spares_waiting or len(self._free) >= n_pages
        assert has_room, "the tree evicted fewer pages than it counts as evictable"

    def _evict(
        self,
        n_pages: int,
        quotas: Mapping[str, int] | None,
        *,
        n_required: int,
        n_beyond: int = 0,
        first: Iterable[WaitingPrompt] = (),
    ) -> None:
        """Evicts pages; the expected prompts among ``first`` count as waiting ones."""
        waiting, expected = chain(self.upcoming_prompts(), first), self.expected_prompts()
        for run in self.tree.evict(
            n_pages, quotas, n_beyond=n_beyond, waiting=waiting, expected=expected, n_required=n_required
        ):
            self.n_evicted += len(run.pages)
            self._give_back(run.namespace, run.pages)

    def _allocate(self, blocks: BlockTable, n_missing: int) -> None:
        """Adds pages to a block table, and as many window pages."""
        self.window_pages.grow(blocks.window, n_missing)
        self._take(blocks, n_missing)

    def _take(self, blocks: BlockTable, n_missing: int) -> None:
        if n_missing > len(self._free) or self.page_quotas.names:
            self._make_free(blocks.namespace, n_missing)
        blocks.pages += self._free.take(n_missing)
        self._n_private += n_missing
        self.page_quotas.add(blocks.namespace, n_missing)

    def _give_back(self, namespace: Namespace, pages: list[int]) -> None:
        """Frees pages that the namespace's owner has owned."""
        self._free += pages
        self.window_pages.take_left()
        if self.page_quotas.names:
            self.page_quotas.add(namespace, -len(pages))
