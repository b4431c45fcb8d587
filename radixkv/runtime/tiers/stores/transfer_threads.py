"""Threads that transfer pages, step by step, in the order of their urgency."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from time import monotonic, perf_counter
from typing import NamedTuple

from radixkv.runtime.finished import Finished
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer

logger = logging.getLogger(__name__)

LAST_STEP_S = 1.0
"""After its limit, ``close`` waits this long for the steps that threads are in."""

STUCK_S = 5.0
"""A step that takes longer hangs in the file system, and its transfer is over."""


class Urgency(IntEnum):
    """Kinds of transfers; the first is the most urgent."""

    LOAD = 0
    REMOVAL = 1
    STORE = 2


class Transfer:
    """Progress of one ticket.

    A transfer is *over* once it has finished or was given up. Threads may still be in a step of one that was given
    up, and must then leave alone what they would have changed.
    """

    def __init__(self, ticket: int, n_steps: int, n_pages: int, deadline: float | None) -> None:
        self.ticket = ticket
        self.deadline = deadline
        """When it is given up, on ``time.monotonic``; None: it never is."""
        self.started: float | None = None
        self.n_steps_left = n_steps
        self._has_succeeded = bytearray(n_steps)
        self._n_pages = n_pages
        self.is_over = False
        self._lock = threading.Lock()
        """Guards ``is_over``: a change of ``apply`` is made before the transfer is given up, or not at all."""

    def apply(self, change: Callable[[], object]) -> bool:
        """Makes a change, which must not hang, unless the transfer is over; returns whether it was made."""
        with self._lock:
            is_under_way = not self.is_over
            if is_under_way:
                change()
        return is_under_way

    def end_step(self, index: int, *, has_succeeded: bool) -> None:
        """Notes the end of a step."""
        self._has_succeeded[index] = has_succeeded
        self.n_steps_left -= 1

    def end(self) -> FinishedTransfer | None:
        """Ends the transfer; returns its outcome, None if it was over already."""
        with self._lock:
            if self.is_over:
                return None
            self.is_over = True
        n_succeeded = self._has_succeeded.find(0)
        seconds = 0.0 if self.started is None else perf_counter() - self.started
        return FinishedTransfer(self.ticket, self._n_pages if n_succeeded < 0 else n_succeeded, seconds)


Step = Callable[[Transfer], bool]
"""Does one part of a transfer; returns whether that succeeded."""


class _Running(NamedTuple):
    """The step that a thread is in."""

    transfer: Transfer
    began: float
    """On ``time.monotonic``."""


class TransferThreads:
    """Daemon threads that take the steps of transfers, and the list of transfers that have finished.

    Args:
        n_threads: number of threads.
        name: beginning of their names.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self._tickets = itertools.count()
        self._transfers: dict[int, Transfer] = {}
        """Transfers that are not over, by ticket. For the caller's thread only."""
        self.n_given_up = 0
        """Transfers that have taken too long."""
        self._running: dict[int, _Running] = {}
        """The step that each thread is in, by the thread's number."""
        self._queues: tuple[deque[tuple[Transfer, int, Step]], ...] = tuple(deque() for _ in Urgency)
        self._wake = threading.Condition()
        """Guards the queues and the progress of transfers."""
        self._is_closing = False
        self._finished = Finished[FinishedTransfer]()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def are_stuck(self) -> bool:
        """Whether all threads hang, so that nothing that is started now would begin. O(threads)."""
        return len(self._stuck()) == len(self._threads)

    def start(self, urgency: Urgency, steps: Sequence[Step], n_pages: int, timeout_s: float | None) -> int:
        """Queues a transfer; returns its ticket. O(steps).

        Args:
            urgency: all steps of a more urgent kind go first.
            steps: the steps, which run in any order.
            n_pages: pages that the transfer reports; fewer if a step fails: those before that step.
            timeout_s: the transfer is given up if it takes longer, or one of its steps longer than ``STUCK_S``;
                None: all steps are taken, however long they take.
        """
        deadline = None if timeout_s is None else monotonic() + timeout_s
        transfer = Transfer(next(self._tickets), len(steps), n_pages, deadline)
        if not steps:
            self._end(transfer)
            return transfer.ticket
        self._transfers[transfer.ticket] = transfer
        with self._wake:
            self._queues[urgency].extend((transfer, index, step) for index, step in enumerate(steps))
            self._wake.notify(len(steps))
        return transfer.ticket

    def start_unreported(self, urgency: Urgency, step: Step) -> None:
        """Queues one step whose end is of no interest. O(1).

        Args:
            urgency: see ``start``.
            step: the step. It may be left out when transfers are given up or dropped.
        """
        transfer = Transfer(next(self._tickets), 1, 0, None)
        transfer.end()
        with self._wake:
            self._queues[urgency].append((transfer, 0, step))
            self._wake.notify()

    def n_waiting(self, urgency: Urgency) -> int:
        """Returns the number of steps of a kind that have not begun. O(1)."""
        return len(self._queues[urgency])

    def take_finished(self) -> list[FinishedTransfer]:
        """Returns the transfers that have finished since the last call, and gives up those that take too long.

        O(transfers under way + threads). Call it once in a second while there are some.
        """
        if self._transfers:
            self._give_up_late()
        finished = self._finished.take()
        for one in finished:
            self._transfers.pop(one.ticket, None)
        return finished

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

    def _stuck(self) -> list[Transfer]:
        """Returns the transfers of the steps that threads hang in, once for each thread. O(threads)."""
        latest = monotonic() - STUCK_S
        return [running.transfer for running in list(self._running.values()) if running.began < latest]

    def _give_up_late(self) -> None:
        now, stuck = monotonic(), self._stuck()
        is_nobody_free = len(stuck) == len(self._threads)
        late = [
            transfer
            for transfer in self._transfers.values()
            if transfer.deadline is not None and (is_nobody_free or transfer.deadline < now or transfer in stuck)
        ]
        for transfer in late:
            self._end(transfer)
        self.n_given_up += len(late)
        if late:
            with self._wake:
                for queue in self._queues:
                    kept = [item for item in queue if not item[0].is_over]
                    queue.clear()
                    queue.extend(kept)

    def _end(self, transfer: Transfer) -> None:
        if (finished := transfer.end()) is not None:
            self._finished.add(finished)

    def _run(self, number: int) -> None:
        while self._take_step(number):
            pass

    def _take_step(self, number: int) -> bool:
        """Waits for a step and takes it; returns False when there will be none."""
        with self._wake:
            while not (queue := next(filter(None, self._queues), None)):
                if self._is_closing:
                    return False
                self._wake.wait()
            transfer, index, step = queue.popleft()
            transfer.started = transfer.started or perf_counter()
            self._running[number] = _Running(transfer, monotonic())
        try:
            has_succeeded = step(transfer)
        except Exception:  # whatever it is, the transfer must finish and the thread must live
            logger.exception("the transfer of a page failed")
            has_succeeded = False
        with self._wake:
            del self._running[number]
            transfer.end_step(index, has_succeeded=has_succeeded)
            is_last = not transfer.n_steps_left
        if is_last:
            self._end(transfer)
        return True
