"""The block table of one request: which pages hold its tokens, and who owns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.tree.node import Lease


class Retired(NamedTuple):
    """A page that left a block table for the tree's own page of the same tokens."""

    last_read: int
    """The newest step whose rows know the table as it was."""
    entry: int
    """Where in the table it stood."""
    page: int


@dataclass(slots=True, eq=False)
class Holding:
    """The pages of one request: a lease on a path of the tree, then its tail."""

    lease: Lease | None
    """None: the request neither reads nor fills the tree."""
    table: list[int]
    """The block table: the lease's pages, then the tail."""
    n_leased: int
    """How many of the table's pages belong to the tree."""
    n_sent: int = 0
    """How many entries of the table, from its start, the device knows."""
    retired: list[Retired] = field(default_factory=list)
    """Duplicates that left the table."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages (source, destination) to copy before its first row; of a fork."""

    @property
    def fills_tree(self) -> bool:
        """Whether a commit reaches the tree: there is a lease, and its path can be found."""
        return self.lease is not None and not self.lease.node.detached

    @property
    def is_settled(self) -> bool:
        """Whether finite rows have covered all that is leased."""
        return self.lease is None or self.lease.node.n_settled == len(self.lease.node.pages)
