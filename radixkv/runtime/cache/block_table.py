"""Block table of one request: the pages that hold its KV, and their ownership."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.runtime.cache.window_table import WindowTable
from radixkv.tree.node import Lease, Namespace, State


class ReplacedPage(NamedTuple):
    """A page that left a block table: rows skip its entry, or the tree's page of the same tokens has taken it."""

    last_step: int
    """The newest launched step that may still read the page."""
    entry: int
    """Index of the page in the block table."""
    page: int
    """Index of the page in the pool."""
    is_duplicate: bool = True
    """Whether the tree's page has taken the entry."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of one request: leased ones, which belong to the tree, then the *tail*, the request's own pages."""

    lease: Lease | None
    """Holds the leased pages. None: the request neither reads from the tree nor adds to it."""
    pages: list[int]
    """Page indices in token order: the lease's pages, then the tail."""
    n_leased: int
    """Number of leading entries that belong to the tree."""
    n_freed: int = 0
    """Number of leading entries whose pages were freed because they lie behind every layer's window. No row reads
    them any more; other requests may have their pages. 0 with a lease."""
    n_on_device: int = 0
    """Number of leading entries that the device has in the block table of the batch slot; skipped ones do not
    count."""
    replaced: list[ReplacedPage] = field(default_factory=list)
    """Own pages that are to be freed once no launched step reads them: duplicates, and those of skipped entries."""
    skipped: list[int] = field(default_factory=list)
    """Entries that rows do not read any more, ascending: see ``PageCache.skip``."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Page copies (source, destination) that the plan of its next row must carry."""
    namespace: Namespace = Namespace()
    """The request's namespace, whose owner owns the private pages."""
    source: Lease | None = None
    """Holds the source of ``copies`` until the copy is done, if the source belongs to the tree."""
    state: State | None = None
    """What its first row goes on from, held in the tree, in a model with states; None once the row is planned, or
    where it starts at position 0."""
    window: WindowTable = field(default_factory=WindowTable)
    """Its pages of layers with windows; empty where all layers have their K and V in ``pages``."""

    @property
    def private_pages(self) -> list[int]:
        """The tail, without pages that were freed, and the replaced duplicates. O(pages)."""
        first = max(self.n_leased, self.n_freed)
        tail = self.pages[first:]
        if self.skipped:
            skipped = set(self.skipped)
            tail = [page for entry, page in enumerate(tail, first) if entry not in skipped]
        return tail + [replaced.page for replaced in self.replaced] if self.replaced else tail

    @property
    def has_copies(self) -> bool:
        """Whether the plan of its next row must copy pages."""
        return bool(self.copies or self.window.copies)

    @property
    def is_in_tree(self) -> bool:
        """Whether the tree has the leased pages: there is a lease, and its path is not detached."""
        return self.lease is not None and not self.lease.node.detached

    @property
    def can_commit(self) -> bool:
        """Whether a commit adds pages to the tree: that has the leased ones, and rows have skipped none so far."""
        return self.lease is not None and not self.lease.node.detached and not self.skipped

    @property
    def n_read(self) -> int:
        """Number of entries that the next row reads. O(1)."""
        return len(self.pages) - len(self.skipped)

    @property
    def n_dropped(self) -> int:
        """Number of skipped entries that were the request's own: their pages are freed. O(log entries)."""
        return len(self.skipped) - bisect_left(self.skipped, self.n_leased)

    def skip(self, entries: Sequence[int]) -> None:
        """Lets the next rows skip these entries. O(entries that were skipped)."""
        first = min(entries)
        self.n_on_device = min(self.n_on_device, first - bisect_left(self.skipped, first))
        self.skipped = sorted([*self.skipped, *entries])

    def unsent_pages(self) -> tuple[int, ...]:
        """Returns the pages that the next row reads and the device does not have yet. O(pages) if there are any."""
        if self.n_on_device == self.n_read:
            return ()
        skipped = set(self.skipped)
        read = [page for entry, page in enumerate(self.pages) if entry not in skipped]
        return tuple(read[self.n_on_device :])

    @property
    def is_computed(self) -> bool:
        """Whether the KV of all leased pages is computed, by finished rows with finite values."""
        return self.lease is None or self.lease.node.n_computed == len(self.lease.node.pages)


class ComputedRow(NamedTuple):
    """A finished row with finite values: the KV of its request's first ``n_tokens`` tokens is computed."""

    blocks: BlockTable
    tokens: bytearray
    """All tokens of the request, little-endian int32."""
    n_tokens: int
    last_step: int
    """The newest launched step with a row of the request, which may still read the block table as it is."""
