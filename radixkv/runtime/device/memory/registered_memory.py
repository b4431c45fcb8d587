"""Memory that another object has mapped, which a thread pins for the device piece by piece."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

import numpy as np

from radixkv.runtime.step.page_copier import MappedSlots

logger = logging.getLogger(__name__)


class RegisteredMemory:
    """Mapped slots whose memory a thread pins from its start on; the constructor returns at once.

    The memory is there, with what it holds, and stays the other object's: nothing is written. If a piece cannot be
    pinned, a warning says why, and the slots from it on never become ready.

    Args:
        mapped: the slots; the mapping is kept until ``close``.
        piece_bytes: most bytes that are pinned at a time; a slot's page lies in one piece.
        pin: pins (address, bytes) for the device; raises ``RuntimeError``.
        unpin: undoes ``pin`` of an address.
    """

    def __init__(
        self,
        mapped: MappedSlots,
        piece_bytes: int,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
    ) -> None:
        self._memory: memoryview | None = mapped.memory[mapped.first :]
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        """Of the first slot's page."""
        self._n_slots, self._slot_bytes = mapped.n_slots, mapped.slot_bytes
        self._n_a_piece = max(1, piece_bytes // mapped.slot_bytes)
        self._pin, self._unpin = pin, unpin
        self._n_ready = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._pin_all, name="register-memory", daemon=True)
        self._thread.start()
        # A process that ends while memory is pinned is aborted, also if nobody closes this object.
        atexit.register(self._end_thread)

    @property
    def n_ready(self) -> int:
        """Leading slots whose memory is pinned; grows, and is 0 after ``close``."""
        return self._n_ready

    def close(self) -> None:
        """Unpins the memory, which no copy may use any more, and lets go of it. May be called again."""
        atexit.unregister(self._end_thread)
        self._end_thread()
        for first in range(0, self._n_ready, self._n_a_piece):
            self._unpin(self.address + first * self._slot_bytes)
        self._n_ready = 0
        self._memory = None

    def _end_thread(self) -> None:
        self._is_closing = True
        self._thread.join()

    def _pin_all(self) -> None:
        assert self._memory is not None
        n_bytes = self._memory.nbytes
        for first in range(0, self._n_slots, self._n_a_piece):
            if self._is_closing:
                return
            last = min(first + self._n_a_piece, self._n_slots)
            start, end = first * self._slot_bytes, min(last * self._slot_bytes, n_bytes)
            try:
                self._pin(self.address + start, end - start)
            except RuntimeError as error:
                logger.warning(
                    "only %d of %d pages of the shared memory are copied to the device in place: %s",
                    first,
                    self._n_slots,
                    error,
                )
                return
            self._n_ready = last
