"""The protocol by which a cache divides its pages among owners, and its default, which divides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree


class PageQuotas:
    """Says who may have how many pages of a cache; this class lets everybody have any. O(1) each.

    An *owner* has the pages that are cached in its namespaces, and those that are private to their block tables.
    """

    names: tuple[str, ...] = ()
    """Owners with a share of pages, whose evictable pages the tree counts apart."""

    def open(self, tree: RadixTree, n_pages: int) -> None:
        """Begins to divide a cache's ``n_pages`` pages; ``tree`` counts the evictable ones. Call it once."""

    def resize(self, n_pages: int) -> None:
        """Sets the number of pages that are divided."""

    def add(self, namespace: Namespace, n_pages: int) -> None:
        """Counts pages that the namespace's owner gets; a negative number of those that are freed."""

    def n_available(self, namespace: Namespace, n_available: int) -> int:
        """Returns how many of the free and evictable pages the namespace's owner can get."""
        return n_available

    def have_room(self, block_tables: Sequence[BlockTable], n_available: int) -> bool:
        """Returns whether each block table can get one of the free and evictable pages."""
        return len(block_tables) <= n_available

    def n_over_cap(self, namespace: Namespace, n_pages: int) -> int:
        """Returns how many of its own pages an owner must evict before it gets ``n_pages`` more."""
        return 0

    def quotas(self, namespace: Namespace) -> Mapping[str, int] | None:
        """Returns how many pages of each owner may be evicted for one of them; None: any pages."""
        return None

    def check(self, n_private: Counter[Namespace]) -> None:
        """Recounts what each owner has. Raises ``InvariantError``.

        Args:
            n_private: private pages of all block tables by namespace.
        """
