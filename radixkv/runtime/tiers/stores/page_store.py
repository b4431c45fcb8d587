"""Contract between the host tier and what keeps pages behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from radixkv.runtime.tiers.stores.page_keys import StateKeys


class FinishedTransfer(NamedTuple):
    """The outcome of one ``look_up``, ``load``, ``store``, ``remove`` or ``clear``."""

    ticket: int
    """What the call returned."""
    n_pages: int
    """Leading pages that a ``look_up`` has found, that a load has read correctly, or that are in the store after a
    ``store``; for ``remove`` and ``clear``, pages that were removed."""
    seconds: float
    """Time from the start of the first page to the end of the last; 0 if none has begun. It begins after the pages
    of other transfers for which the first one waits, in every store, so that the times of stores compare."""


class Removal(NamedTuple):
    """A removal that has begun: no page of it is found any more."""

    ticket: int
    """Ticket of the ``FinishedTransfer``."""
    n_pages: int
    """Pages that are removed."""


class StoreHealth(NamedTuple):
    """How well a store that several servers use can be reached."""

    n_failures: int
    """Lookups, loads, stores and removals that have failed or taken too long."""
    is_away: bool
    """Whether the store has failed, and not answered since the pause after that."""


class PageCounts(NamedTuple):
    """What has become of a store's pages since it was opened."""

    n_written: int = 0
    """Pages that it has written: not those that were there already."""
    n_lost: int = 0
    """Pages that it had, and that were damaged or had vanished when they were to be read."""


class PageStore(Protocol):
    """Keeps pages of KV by key, outside the process's memory.

    The value of a key is one page: K and V of all layers, contiguous, ``page_bytes`` long. ``page_keys`` makes the
    keys. A store compares the page's tokens and a checksum of all bytes, so that it gives the right page or none.
    It may lose any page at any time, and other servers may use the same one. Its errors are misses and warnings in
    the log, never exceptions.

    All methods belong to one thread; transfers run in the background, in any order, loads before stores. The caller
    leaves a transfer's buffers alone until the transfer has finished.
    """

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""

    @property
    def n_pages(self) -> int:
        """Pages in the store, with those of other models; of a store that several servers use, those it knows."""

    @property
    def n_bytes(self) -> int:
        """Bytes that these pages occupy."""

    @property
    def counts(self) -> PageCounts:
        """What has become of its pages. O(1)."""

    @property
    def health(self) -> StoreHealth | None:
        """How well the store can be reached; None if no other server uses it."""

    def run(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that the store is known to have, which is no use of them.

        Reads nothing; O(that number).
        """

    def has(self, key: bytes) -> bool:
        """Returns whether the store is known to have a page, which is no use of it. O(1)."""

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        """Starts to look for leading keys that other servers have stored; ``run`` knows what was found.

        Args:
            keys: of a sequence's pages, from its start.
            first: pages at its start that are not looked for, because they can be had.
            states: keys of its states; the deepest one behind the keys that are found is looked for, too, if there
                is one behind ``first`` pages. None if pages are of use without a state.

        Returns:
            A ticket. None if there is nothing to look for: no other server uses the store, or it is away.
        """

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """Starts to read pages; returns a ticket. O(pages).

        Args:
            keys: the pages' keys.
            tokens: the tokens of these pages, little-endian int32.
            buffers: where the pages go: writable, ``page_bytes`` each. Buffers after the ``n_pages`` that were read
                correctly have undefined contents.
        """

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """Starts to write the pages that the store does not have; returns a ticket. O(pages).

        The arguments are those of ``load``. Stores that are more than the store can take are dropped.
        """

    def spare(self, keys: Sequence[bytes]) -> None:
        """Marks these pages and those before them: the store removes or forgets them after all others. Replaces the
        keys of the call before. O(keys · log pages).

        Args:
            keys: of the last page of each prompt that waits; the first one will be loaded first.
        """

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """Removes all pages of a namespace, or a page and those that continue it, as far as ``run`` knows them.

        ``run`` finds none of them any more, and stores that have not finished are dropped, whatever their keys. A
        restart finds none once the ticket has finished, unless a page could not be deleted. O(pages in the store).

        Args:
            key: the namespace's key, or the page's.
            leading: keys of the pages before that page, in order. They are removed too, from the last one back to
                the first that another page continues.
        """

    def clear(self) -> int:
        """Removes all pages, also those of other models, as ``remove`` does; returns a ticket.

        A store that several servers use keeps them, and only forgets that it has them.
        """

    def take_removed(self) -> list[bytes]:
        """Returns the keys of pages that were removed or lost since the last call; the first call returns none.

        A page may be back in the store by now. Nothing is recorded before the first call. O(1).
        """

    def take_finished(self) -> list[FinishedTransfer]:
        """Returns the transfers that have finished since the last call, in any order. O(1) if there is none."""

    def fileno(self) -> int:
        """A descriptor that is readable while ``take_finished`` has something to return."""

    def close(self, timeout_s: float) -> None:
        """Drops the loads that have not begun, finishes the stores within a limit, and drops those left then.

        No other method may be called afterwards.
        """
