"""Locks of slots that the kernel frees when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process (0 for these locks)."""
_FIRST_BYTE = 1 << 40
"""Slot 0's byte. Locks may lie behind the end of a file, where none is in the way of another's."""
WHOLE_SEGMENT = -1
"""What is locked in place of a slot while a segment is made."""


class SlotLocks:
    """The locks that one thread holds: each is one byte of a file, shared by readers or held by one writer.

    They are locks of an *open file description* (``F_OFD_SETLK``): two of these objects exclude each other in one
    process as in two, and no other ``close`` of the same file frees them, as it would those of ``lockf``. The
    kernel frees them at the death of the process, at whichever instruction. Nothing here waits.

    Args:
        descriptor: of the file, which may have lost its name. It is opened once more, so that the locks are this
            object's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def try_lock_shared(self, slot: int) -> bool:
        """Locks a slot against writers; returns False if one has it. O(1), some µs."""
        return self._try(fcntl.F_RDLCK, slot)

    def try_lock_exclusive(self, slot: int) -> bool:
        """Locks a slot against readers and writers; returns False if one of them has it. O(1), some µs."""
        return self._try(fcntl.F_WRLCK, slot)

    def unlock(self, slot: int, last: int | None = None) -> None:
        """Unlocks a slot, or all slots up to ``last``. One call of some µs, and O(locks that are held)."""
        self._try(fcntl.F_UNLCK, slot, 1 if last is None else last + 1 - slot)

    def close(self) -> None:
        """Unlocks all slots."""
        os.close(self._descriptor)

    def _try(self, kind: int, slot: int, n_slots: int = 1) -> bool:
        try:
            fcntl.fcntl(
                self._descriptor,
                fcntl.F_OFD_SETLK,
                _FLOCK.pack(kind, os.SEEK_SET, _FIRST_BYTE + slot, n_slots, 0),
            )
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
