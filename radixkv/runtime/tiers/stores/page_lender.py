"""Contract between the storage tier and a store whose pages the device can copy where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.runtime.step.page_copier import MappedSlots
from radixkv.runtime.tiers.stores.page_store import PageStore


class PageLender(PageStore, Protocol):
    """A ``PageStore`` in memory of this process, which lends pages: a lent slot keeps its page until it is given
    back."""

    @property
    def mapped_slots(self) -> MappedSlots:
        """Where the slots are, for as long as the store is open and whoever has asked for it keeps the memory."""

    @property
    def n_lendable(self) -> int:
        """Most pages that can be lent beside those that are."""

    def lend(self, keys: Sequence[bytes], tokens: bytes, n_usable: int) -> list[int] | None:
        """Returns the slots that have these pages, which nobody overwrites until they are given back. O(pages).

        Args:
            keys: the pages' keys.
            tokens: the tokens of these pages, little-endian int32.
            n_usable: leading slots that the borrower can use.

        Returns:
            None if a page is not there, if its slot is not usable or is being written, or if too many are lent.
        """

    def give_back(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Ends a loan. Counts as a use of the pages, and of those before them. O(pages)."""
