"""Threads that transfer pages, step by step, in the order of their urgency."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from time import monotonic, perf_counter

from radixkv.runtime.cache.tiers.page_store import FinishedTransfer
from radixkv.runtime.finished import Finished

logger = logging.getLogger(__name__)

LAST_STEP_S = 1.0
"""After its limit, ``close`` waits this long for the steps that threads are in."""

Step = Callable[[], bool]
"""Does one part of a transfer; returns whether that succeeded."""


class Urgency(IntEnum):
    """Kinds of transfers; the first is the most urgent."""

    LOAD = 0
    REMOVAL = 1
    STORE = 2


class _Transfer:
    """Progress of one ticket."""

    def __init__(self, ticket: int, n_steps: int, n_pages: int) -> None:
        self.ticket = ticket
        self.n_steps_left = n_steps
        self.n_pages = n_pages
        self.started: float | None = None

    def finished(self) -> FinishedTransfer:
        seconds = 0.0 if self.started is None else perf_counter() - self.started
        return FinishedTransfer(self.ticket, self.n_pages, seconds)


class TransferThreads:
    """Daemon threads that take the steps of transfers, and the list of transfers that have finished.

    Args:
        n_threads: number of threads.
        name: beginning of their names.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self._tickets = itertools.count()
        self._queues: tuple[deque[tuple[_Transfer, int, Step]], ...] = tuple(deque() for _ in Urgency)
        self._wake = threading.Condition()
        """Guards the queues and the progress of transfers."""
        self._is_closing = False
        self._finished = Finished[FinishedTransfer]()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, urgency: Urgency, steps: Sequence[Step], n_pages: int) -> int:
        """Queues a transfer; returns its ticket. O(steps).

        Args:
            urgency: all steps of a more urgent kind go first.
            steps: the steps, which run in any order.
            n_pages: pages that the transfer reports; fewer if a step fails: those before that step.
        """
        transfer = _Transfer(next(self._tickets), len(steps), n_pages)
        with self._wake:
            self._queues[urgency].extend((transfer, index, step) for index, step in enumerate(steps))
            self._wake.notify(len(steps))
        if not steps:
            self._finished.add(transfer.finished())
        return transfer.ticket

    def n_waiting(self, urgency: Urgency) -> int:
        """Returns the number of steps of a kind that have not begun. O(1)."""
        return len(self._queues[urgency])

    def take_finished(self) -> list[FinishedTransfer]:
        """Returns the transfers that have finished since the last call. O(1) if there is none."""
        return self._finished.take()

    def fileno(self) -> int:
        """A descriptor that is readable while ``take_finished`` has something to return."""
        return self._finished.fileno()

    def close(self, timeout_s: float) -> bool:
        """Drops loads, takes the other steps within the limit, and drops those left then.

        Returns:
            Whether all threads have ended. A thread that hangs in the file system has not.
        """
        with self._wake:
            self._is_closing = True
            self._queues[Urgency.LOAD].clear()
            self._wake.notify_all()
        self._join(timeout_s)
        with self._wake:
            n_dropped = sum(map(len, self._queues))
            for queue in self._queues:
                queue.clear()
        if n_dropped:
            logger.info("%d transfers of pages were dropped after %g s", n_dropped, timeout_s)
        self._join(LAST_STEP_S)
        have_ended = not any(thread.is_alive() for thread in self._threads)
        if have_ended:
            self._finished.close()
        return have_ended

    def _join(self, timeout_s: float) -> None:
        """Waits for the ends of the threads, ``timeout_s`` at most."""
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _run(self) -> None:
        while self._take_step():
            pass

    def _take_step(self) -> bool:
        """Waits for a step and takes it; returns False when there will be none."""
        with self._wake:
            while not (queue := next(filter(None, self._queues), None)):
                if self._is_closing:
                    return False
                self._wake.wait()
            transfer, index, step = queue.popleft()
            transfer.started = transfer.started or perf_counter()
        try:
            has_succeeded = step()
        except Exception:  # whatever it is, the transfer must finish and the thread must live
            logger.exception("the transfer of a page failed")
            has_succeeded = False
        with self._wake:
            transfer.n_steps_left -= 1
            if not has_succeeded:
                transfer.n_pages = min(transfer.n_pages, index)
            has_finished = not transfer.n_steps_left
        if has_finished:
            self._finished.add(transfer.finished())
        return True
