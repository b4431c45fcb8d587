"""Copies between the tiers of a replay: they are finished at once, and say how long they would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from radixkv.errors import InvariantError
from radixkv.runtime.step.page_copier import FinishedCopy
from radixkv.runtime.tiers.stores.indexed_store import IndexedStore
from radixkv.runtime.tiers.stores.page_index import IndexedPage
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, Removal


class InstantCopier:
    """A ``PageCopier`` whose copies are finished at once. Nothing is copied: a replay has no KV.

    Args:
        page_seconds: time that the load of a page would take.
    """

    n_slots = 0
    n_state_slots = 0
    n_mapped_slots = 0
    page_bytes = 1
    is_growing = False

    def __init__(self, page_seconds: float) -> None:
        self._page_seconds = page_seconds
        self._tickets = count()
        self._finished: list[FinishedCopy] = []

    def take_new_slots(self) -> range:
        """Returns none: the host tier has all its slots from the start."""
        return range(0)

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Finishes a copy of the pages, with the time that it would take."""
        ticket = next(self._tickets)
        self._finished.append(FinishedCopy(ticket, len(pages) * self._page_seconds, None))
        return ticket

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Finishes a copy of the pages, with the time that a load of them would take."""
        return self.load(slots, pages)

    def take_finished(self) -> list[FinishedCopy]:
        """Returns the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def buffer(self, slot: int) -> memoryview:
        """Returns an empty buffer: no slot has memory."""
        return memoryview(b"")

    def fileno(self) -> int:
        """Raises ``InvariantError``: there is nothing to wait for."""
        raise InvariantError("a replay waits for a copy, and copies take no time")

    def close(self) -> None:
        """Does nothing."""


class InstantStore(IndexedStore):
    """A ``PageStore`` that knows only which pages it has, in the index of the server's page files.

    So the pages that go first are those that the server would remove.

    Args:
        max_pages: pages that it may have.
        page_seconds: time that the load of a page would take.
    """

    def __init__(self, max_pages: int, page_seconds: float) -> None:
        super().__init__(page_bytes=1, page_token_bytes=0)
        self._max_pages = max_pages
        self._page_seconds = page_seconds
        self._tickets, self._ticks = count(), count()
        self._finished: list[FinishedTransfer] = []

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``."""
        n_pages = self.run(keys)
        for key in keys[:n_pages]:
            self._index.touch(key, next(self._ticks))
        return self._finish(n_pages)

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``."""
        for key in keys:
            tick = next(self._ticks)
            if key in self._index:
                self._index.touch(key, tick)
                continue
            if self.n_pages == self._max_pages and (first := self._index.first_to_go()) is not None:
                self._index.remove(first.key)
                self._note_removed((first,))
            self._index.add(IndexedPage(key, self.page_bytes, tick))
            self.counts = self.counts._replace(n_written=self.counts.n_written + 1)
        return self._finish(len(keys))

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """See ``PageStore``."""
        files = self._take_below(key, leading)
        return Removal(self._finish(len(files)), len(files))

    def clear(self) -> int:
        """See ``PageStore``."""
        return self._finish(len(self._take_all()))

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        finished, self._finished = self._finished, []
        return finished

    def fileno(self) -> int:
        """Raises ``InvariantError``: there is nothing to wait for."""
        raise InvariantError("a replay waits for a transfer, and transfers take no time")

    def close(self, timeout_s: float) -> None:
        """Does nothing."""

    def _finish(self, n_pages: int) -> int:
        ticket = next(self._tickets)
        self._finished.append(FinishedTransfer(ticket, n_pages, n_pages * self._page_seconds))
        return ticket
