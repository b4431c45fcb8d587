"""The host slots of a device, and the threads that copy pages between them and its KV pool."""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from radixkv.errors import ConfigError
from radixkv.runtime.finished import Finished
from radixkv.runtime.step.page_copier import FinishedCopy, MappedSlots

logger = logging.getLogger(__name__)

_Job = tuple[int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""Ticket, slots and pages of a copy, and its states."""


class HostSlots(Protocol):
    """Host memory for pages, and the two blocking copies between it and a device's pool.

    ``load`` and ``store`` may run at the same time, each in one thread. They release the interpreter's lock while
    they wait.
    """

    n_slots: int
    """Slots in all."""
    page_bytes: int
    """Size of a slot in bytes."""

    @property
    def n_usable(self) -> int:
        """Leading slots whose memory is ready; grows up to ``n_slots``."""
        ...

    @property
    def is_growing(self) -> bool:
        """Whether ``n_usable`` may grow yet; it has its last value before this is False."""
        ...

    @property
    def n_mapped_slots(self) -> int:
        """See ``PageCopier.n_mapped_slots``."""
        ...

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a usable slot."""
        ...

    def map_slots(self, mapped: MappedSlots) -> None:
        """Lets ``load`` take slots of a mapping, too, from number ``n_slots`` on. Called once."""
        ...

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages; returns when the device has the data."""
        ...

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots; returns when the host has the data."""
        ...

    def close(self) -> None:
        """Frees the memory."""
        ...


class StateCopies(Protocol):
    """The blocking copies of what goes with pages: states of recurrent layers, or window pages.

    What ``HostSlots`` says of threads holds here, too.
    """

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies from the host (source, destination); returns when the device has the data."""
        ...

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies to the host (source, destination); returns when the host has the data."""
        ...


class HostStates(StateCopies, Protocol):
    """Host memory for states of recurrent layers, and the copies between it and the slots of the tree."""

    n_slots: int
    """Slots, whose memory is ready when a slot of a page is."""

    def buffers(self, slot: int) -> list[memoryview]:
        """Returns the memory of a slot in parts of the size of a page."""
        ...


def count_slots(n_bytes: int, page_bytes: int) -> int:
    """Returns how many host slots of ``page_bytes`` fit into ``n_bytes``.

    Raises:
        ConfigError: not even one fits.
    """
    if n_bytes < page_bytes:
        raise ConfigError(
            f"a host tier of {n_bytes} bytes is less than one page, which takes {page_bytes}; set --host-memory to "
            "at least that, or leave it out"
        )
    return n_bytes // page_bytes


class CopyThreads:
    """A ``runtime.step.page_copier.PageCopier`` over ``HostSlots``: loads and stores have a thread each.

    Args:
        slots: the host memory and its copies; closed with this object.
        states: the same for states of recurrent layers; None if the model has none.
        windows: copies window pages, whose host memory is that of slots; None if the model has none.
        begin_thread: called first in each thread, as to choose its device.
    """

    def __init__(
        self,
        slots: HostSlots,
        states: HostStates | None = None,
        windows: StateCopies | None = None,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._slots, self._states = slots, states
        self._copies: StateCopies | None = states or windows
        self.n_state_slots = 0 if states is None else states.n_slots
        self.n_slots, self.page_bytes = slots.n_slots, slots.page_bytes
        self._n_taken = 0
        self._tickets = itertools.count()
        self._finished = Finished[FinishedCopy]()
        self._loads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closing = False
        self._begin_thread = begin_thread
        self._threads = [
            threading.Thread(target=self._run, args=(jobs, is_load), name=name, daemon=True)
            for jobs, is_load, name in ((self._loads, True, "page-loads"), (self._stores, False, "page-stores"))
        ]
        for thread in self._threads:
            thread.start()
        # torch aborts a process that ends in the middle of a copy, also if nobody closes this object.
        atexit.register(self._end_threads)

    @property
    def is_growing(self) -> bool:
        """Whether slots may become usable later. O(1)."""
        return self._slots.is_growing

    def take_new_slots(self) -> range:
        """Returns the slots that have become usable since the last call. O(1)."""
        first, self._n_taken = self._n_taken, self._slots.n_usable
        return range(first, self._n_taken)

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a usable slot, writable. O(1)."""
        return self._slots.buffer(slot)

    def state_buffers(self, slot: int) -> list[memoryview]:
        """Returns the memory of a state in parts of ``page_bytes``, writable. O(parts)."""
        assert self._states is not None, "there are no states"
        return self._states.buffers(slot)

    @property
    def n_mapped_slots(self) -> int:
        """See ``PageCopier.n_mapped_slots``. O(1)."""
        return self._slots.n_mapped_slots

    def map_slots(self, mapped: MappedSlots) -> None:
        """See ``HostMemoryCopier.map_slots``."""
        self._slots.map_slots(mapped)

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Queues a copy of slots to pages, and of states; returns its ticket. O(pages)."""
        return self._put(self._loads, slots, pages, states)

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """Queues a copy of pages to slots, and of states; returns its ticket. O(pages)."""
        return self._put(self._stores, slots, pages, states)

    def take_finished(self) -> list[FinishedCopy]:
        """Returns the copies that have finished since the last call. O(1) if there is none."""
        return self._finished.take()

    def fileno(self) -> int:
        """A descriptor that is readable while ``take_finished`` has something to return."""
        return self._finished.fileno()

    def close(self) -> None:
        """Waits for the copies that have begun, drops the others, and frees the host memory."""
        atexit.unregister(self._end_threads)
        self._end_threads()
        self._slots.close()
        self._finished.close()

    def _put(
        self,
        jobs: queue.SimpleQueue[_Job | None],
        slots: Sequence[int],
        pages: Sequence[int],
        states: Sequence[tuple[int, int]],
    ) -> int:
        ticket = next(self._tickets)
        jobs.put((ticket, tuple(slots), tuple(pages), tuple(states)))
        return ticket

    def _end_threads(self) -> None:
        self._is_closing = True
        self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: queue.SimpleQueue[_Job | None], is_load: bool) -> None:
        self._begin_thread()
        while (job := jobs.get()) is not None and not self._is_closing:
            ticket, slots, pages, states = job
            error = None
            started = perf_counter()
            try:
                if is_load:
                    self._slots.load(slots, pages)
                else:
                    self._slots.store(pages, slots)
                if states and self._copies is not None:
                    (self._copies.load if is_load else self._copies.store)(states)
            except Exception as problem:  # any exception fails this copy; the cache treats it as a miss
                error = f"{type(problem).__name__}: {problem}"
                logger.exception("a copy of %d pages failed", len(pages))
            self._finished.add(FinishedCopy(ticket, perf_counter() - started, error))
