"""What threads have finished, for a loop that waits on a descriptor."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Waits until one of the descriptors is readable, at most ``timeout_s``; returns those that are."""
    poll = select.poll()  # select.select takes no descriptor above 1023, and an application may have as many
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


class Finished(Generic[T]):
    """Items that any thread adds and one thread takes, with a descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Held while both the items and the event change: the event is set if there is an item."""

    def add(self, item: T) -> None:
        """Adds an item. O(1)."""
        with self._lock:
            self._items.append(item)
            os.eventfd_write(self._event, 1)

    def take(self) -> list[T]:
        """Returns the items since the last call, in the order in which they were added. O(1) if there is none."""
        if not self._items:
            return []
        with self._lock:
            os.eventfd_read(self._event)
            items, self._items = self._items, []
        return items

    def fileno(self) -> int:
        """A descriptor that is readable while ``take`` has something to return."""
        return self._event

    def close(self) -> None:
        """Closes the descriptor. No other method may be called afterwards."""
        os.close(self._event)
