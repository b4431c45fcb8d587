"""The block table of one request: which pages hold its tokens, and who owns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.tree.node import Lease


class ReplacedPage(NamedTuple):
    """A page that left a block table for the tree's own page of the same tokens."""

    last_read: int
    """The newest step whose rows know the table as it was."""
    entry: int
    """Where in the table it stood."""
    page: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of one request: a lease on a path of the tree, then its tail."""

    lease: Lease | None
    """None: the request neither reads nor fills the tree."""
    pages: list[int]
    """The block table: the lease's pages, then the tail."""
    n_leased: int
    """How many of the table's pages belong to the tree."""
    n_on_device: int = 0
    """How many entries of the table, from its start, the device knows."""
    replaced: list[ReplacedPage] = field(default_factory=list)
    """Duplicates that left the table."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages (source, destination) to copy before its first row; of a fork."""

    @property
    def can_commit(self) -> bool:
        """Whether a commit reaches the tree: there is a lease, and its path can be found."""
        return self.lease is not None and not self.lease.node.detached

    @property
    def is_computed(self) -> bool:
        """Whether finite rows have covered all that is leased."""
        return self.lease is None or self.lease.node.n_computed == len(self.lease.node.pages)
