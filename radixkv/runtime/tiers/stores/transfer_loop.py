"""A thread whose event loop runs transfers over the network."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Coroutine
from time import monotonic, perf_counter
from typing import Any

from radixkv.runtime.finished import Finished
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer

logger = logging.getLogger(__name__)

_LAST_TURN_S = 1.0
"""After its limit, ``close`` waits this long for the transfers that it has cancelled."""


class Beginning:
    """Notes when a transfer's first page begins, after the pages of others for which it has waited."""

    def __init__(self) -> None:
        self.at: float | None = None
        """On ``time.perf_counter``; None before."""

    def note(self) -> None:
        """Notes that a page begins. O(1)."""
        if self.at is None:
            self.at = perf_counter()


class TransferLoop:
    """A daemon thread with an event loop for the coroutines of transfers, and the list of those that have finished.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._tickets = itertools.count()
        self._finished = Finished[FinishedTransfer]()
        self._transfers: dict[int, tuple[asyncio.Task[None], bool]] = {}
        """Transfers under way, and whether ``close`` waits for them. For the thread only."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(
        self, transfer: Coroutine[Any, Any, int], beginning: Beginning | None = None, *, is_kept: bool = False
    ) -> int:
        """Starts a transfer; returns its ticket. O(1).

        Args:
            transfer: returns the number of pages for ``FinishedTransfer``. None of them counts if it is cancelled
                or raises.
            beginning: notes when the time of the transfer begins; None: at once.
            is_kept: whether ``close`` waits for it, rather than cancel it.
        """
        ticket = next(self._tickets)
        if beginning is None:
            beginning = Beginning()
            beginning.note()
        self._loop.call_soon_threadsafe(self._begin, ticket, transfer, beginning, is_kept)
        return ticket

    def take_finished(self) -> list[FinishedTransfer]:
        """Returns the transfers that have finished since the last call. O(1) if there is none."""
        return self._finished.take()

    def fileno(self) -> int:
        """A descriptor that is readable while ``take_finished`` has something to return."""
        return self._finished.fileno()

    def close(self, timeout_s: float) -> None:
        """Cancels the transfers, but gives those that are kept ``timeout_s`` to finish, and ends the thread."""
        end = monotonic() + timeout_s + _LAST_TURN_S
        asyncio.run_coroutine_threadsafe(self._end(timeout_s), self._loop)
        self._thread.join(max(0.0, end - monotonic()))
        if not self._thread.is_alive():
            self._loop.close()
            self._finished.close()

    def _begin(self, ticket: int, transfer: Coroutine[Any, Any, int], beginning: Beginning, is_kept: bool) -> None:
        self._transfers[ticket] = self._loop.create_task(self._run(ticket, transfer, beginning)), is_kept

    async def _run(self, ticket: int, transfer: Coroutine[Any, Any, int], beginning: Beginning) -> None:
        n_pages = 0
        try:
            n_pages = await transfer
        except Exception:  # whatever it is, the transfer must finish and the thread must live
            logger.exception("a transfer of pages failed")
        finally:
            del self._transfers[ticket]
            seconds = 0.0 if beginning.at is None else perf_counter() - beginning.at
            self._finished.add(FinishedTransfer(ticket, n_pages, seconds))

    async def _end(self, timeout_s: float) -> None:
        kept = {task for task, is_kept in self._transfers.values() if is_kept}
        for task, is_kept in self._transfers.values():
            if not is_kept:
                task.cancel()
        if kept:
            _, late = await asyncio.wait(kept, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                logger.info("%d transfers of pages were dropped after %g s", len(late), timeout_s)
        left = [task for task, _ in self._transfers.values()]
        if left:
            await asyncio.wait(left, timeout=_LAST_TURN_S / 2)
        self._loop.stop()
