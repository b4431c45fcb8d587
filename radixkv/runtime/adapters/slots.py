"""Copies adapters into the slots of a device while steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import NamedTuple

from radixkv.errors import DeviceLost
from radixkv.processes.nice_threads import start_nice_thread
from radixkv.runtime.adapters.slot_queue import SlotQueue
from radixkv.runtime.finished import Finished
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.request import Request
from radixkv.runtime.step.adapters import AdapterCopy, DeviceAdapters


class _Coming(NamedTuple):
    """The adapter that gets the next slot."""

    digest: str
    copy: AdapterCopy


class AdapterSlots:
    """The slots of a device that has fewer of them than adapters may be loaded.

    ``SlotQueue`` decides which adapter is next. A thread copies it, one at a time, while all slots may be in use:
    the device has a spare one. It takes its place in the first turn that finds a slot that is not in use.

    Call ``open_queue`` and ``watch`` before the first request.

    Args:
        device: has the weights.
        n_slots: adapters that steps can have, beside the spare slot.
        clock: seconds, monotonic.
    """

    def __init__(self, device: DeviceAdapters, n_slots: int, clock: Callable[[], float] = monotonic) -> None:
        self.n_loads = 0
        """How often an adapter has got a slot since the start."""
        self._device = device
        self._n_slots = n_slots
        self._clock = clock
        self._queue: SlotQueue | None = None
        self._users: Callable[[], Iterable[Request]] = tuple
        self._coming: _Coming | None = None
        self._thread: threading.Thread | None = None
        """The thread that copies ``_coming``."""
        self._filled: Finished[Exception | None] = Finished()
        """The errors of copies that have ended."""

    def open_queue(self, queue: Queue, weights: Mapping[str, float] | None = None) -> SlotQueue:
        """Returns the waiting queue of the engine, in front of one for the requests that can be admitted.

        Args:
            queue: that of the requests that can be admitted.
            weights: of all senders; none: all requests are of one.
        """
        self._queue = SlotQueue(queue, self._n_slots, self._clock, weights)
        return self._queue

    def watch(self, users: Callable[[], Iterable[Request]]) -> None:
        """Takes what returns the requests that hold or load pages."""
        self._users = users

    @property
    def queue(self) -> SlotQueue:
        """The waiting queue."""
        assert self._queue is not None, "open_queue comes before the first request"
        return self._queue

    @property
    def is_busy(self) -> bool:
        """Whether ``advance`` has something to do, now or once the descriptor is readable."""
        return self._coming is not None or self.queue.has_lines

    def is_coming(self, digest: str) -> bool:
        """Returns whether an adapter is being copied, or is copied and has no place yet."""
        return self._coming is not None and self._coming.digest == digest

    def advance(self) -> None:
        """Gives the adapter that has been copied its slot, and begins to copy the next one. Called between turns.

        O(slots · adapters in line + requests with pages) while requests wait, with senders O(senders).

        Raises:
            DeviceLost: an adapter could not be copied.
        """
        for error in self._filled.take():
            self._join()
            if error is not None:
                raise DeviceLost(f"an adapter could not be copied: {type(error).__name__}: {error}") from error
        if self._coming is not None and self._thread is None:
            self._place(self._coming)
        self.queue.take_turns(self._users())
        if self._coming is None and (digest := self.queue.next_adapter()) is not None:
            self._begin(digest)

    def remove(self, digest: str) -> None:
        """Frees the slot of an adapter, if it has one: another one gets it, or it is unloaded. Nothing uses it."""
        if self.queue.withdraw(digest):
            self._device.withdraw(digest)

    def fileno(self) -> int:
        """A descriptor that is readable when an adapter has been copied."""
        return self._filled.fileno()

    def close(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            self._join()
        self._filled.close()

    def _place(self, coming: _Coming) -> None:
        """Gives an adapter that is copied a slot, if one is not in use; forgets it if no request waits any more."""
        if not self.queue.has_line(coming.digest):
            coming.copy.discard()
            self._coming = None
            return
        is_found, evicted = self.queue.find_slot(self._users())
        if not is_found:
            return
        if evicted is not None:
            self.remove(evicted)
        coming.copy.put()
        self.queue.put(coming.digest)
        self._coming = None
        self.n_loads += 1

    def _begin(self, digest: str) -> None:
        coming = self._coming = _Coming(digest, self._device.copy(digest))
        try:
            self._thread = start_nice_thread(lambda: self._filled.add(_fill(coming.copy)))
        except RuntimeError as error:  # Python's, where the system starts no more threads
            raise DeviceLost(f"an adapter could not be copied: {error}") from error

    def _join(self) -> None:
        assert self._thread is not None, "one thread fills one copy"
        self._thread.join()
        self._thread = None


def _fill(copy: AdapterCopy) -> Exception | None:
    try:
        copy.fill()
    except Exception as error:  # an adapter that is neither filled nor failed would be waited for for ever
        return error
    return None
