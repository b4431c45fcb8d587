"""The protocol of the branch ``tenants``: batch slots and pages are divided among senders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from radixkv.wire.stats import TenantStats

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Shares:
    """Divides the batch slots and pages of the device among senders.

    This class is the protocol and its default, which divides nothing. O(1) each.
    """

    def may_take_batch_slot(self, request: Request) -> bool:
        """Returns whether the request's sender may have one batch slot more, if there is a free one."""
        return True

    def take_batch_slot(self, request: Request) -> None:
        """Counts a batch slot that a request gets."""

    def give_batch_slot_back(self, request: Request) -> None:
        """Counts a batch slot that a request no longer has."""

    def is_of_same(self, one: Request, other: Request) -> bool:
        """Returns whether two requests are of one sender."""
        return True

    def is_ahead(self, one: Request, other: Request) -> bool:
        """Returns whether ``other`` must leave free the pages that ``one``, which is being prefilled, still
        needs."""
        return one.order < other.order

    def n_reserved(self, request: Request) -> int:
        """Returns how many pages are reserved for the request's sender."""
        return 0

    def n_reserved_beside(self, request: Request) -> int:
        """Returns how many pages are reserved for all others."""
        return 0

    def is_capped(self, request: Request) -> bool:
        """Returns whether a cap of the request's sender, and not what others hold, limits the pages it can get."""
        return False

    def may_give(self, request: Request) -> Callable[[Request], bool]:
        """Returns a function that says whether ``request`` could use the pages of another request."""
        return lambda other: True

    def victims(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Returns the requests among which the victim is chosen: the last of them in order is preempted."""
        return candidates

    def count(self, sender: str) -> tuple[int, int]:
        """Returns how many batch slots a sender has, and how many of its requests are in the queue."""
        raise KeyError(sender)

    def stats(self, count_of: Callable[[str], tuple[int, int]]) -> dict[str, TenantStats]:
        """Returns counters and gauges of each sender.

        Args:
            count_of: returns how many requests of a sender run, and how many wait.
        """
        return {}

    def stuck(self, running: Iterable[Request]) -> Iterable[Sequence[Request]]:
        """Yields the paused requests of each sender that has no other batch slots, while more of its requests
        wait."""
        return ()
