"""A file in memory that the servers of one machine map: who may use it, how it is made, and what is where in it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from radixkv.errors import ConfigError, shortened
from radixkv.runtime.device.memory_check import require_memory
from radixkv.runtime.tiers.stores.page_value import BLOCK_BYTES, header_bytes
from radixkv.runtime.tiers.stores.shared_memory.slot_locks import WHOLE_SEGMENT, SlotLocks
from radixkv.runtime.tiers.stores.shared_memory.slot_table import ENTRY_BYTES, SlotTable
from radixkv.settings.values import parse_bytes

_MAGIC = b"radixkv shared 2"
"""At the start of a segment that is made; its last character is the version of the format."""
_N_VERSION_BYTES = 1
_FORMAT = struct.Struct("<QQ")
"""Bytes of a page, and of its tokens."""
_SIZE = struct.Struct("<Q")
_SIZE_AT, _FORMAT_AT, _HAS_FORMAT_AT = 64, 128, 192
_PAUSE_S = 0.02
_MAKING_S, _MAKING_BYTES_PER_S = 20.0, 256 << 20
"""How long another server may take to make a segment, which is filled with zeros."""


class SegmentName(NamedTuple):
    """What ``shm://NAME?size=SIZE&folder=FOLDER`` says."""

    path: Path
    n_bytes: int

    @classmethod
    def parse(cls, url: str) -> SegmentName:
        """Returns where the segment is, and its size. The settings have checked the form."""
        parts = urlsplit(url)
        fields = dict(field.split("=", 1) for field in parts.query.split("&"))
        folder = Path(unquote(fields.get("folder", "/dev/shm")))
        return cls(folder / f"radixkv-{os.getuid()}-{parts.netloc}", parse_bytes(fields["size"]))


class Segment:
    """A file of one user with mode 0600, all of whose memory is there when this returns.

    The first server makes it, with ``posix_fallocate``: so a file system without room is an error here, and no
    access to the mapping ends a process later. Nothing ever makes the file shorter. It stays when servers end.

    Args:
        url: ``shm://NAME?size=SIZE``, in ``/dev/shm``, or with ``&folder=FOLDER`` in another folder in memory.

    Raises:
        ConfigError: the file belongs to another user, is open to others, has another version or size, or there is
            no room for it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._path, self.n_bytes = SegmentName.parse(url)
        if self.n_bytes <= BLOCK_BYTES:
            raise self._unusable(f"a size of {self.n_bytes} bytes holds no page; give a larger one")
        try:
            self.descriptor = self._open()
        except OSError as error:
            raise self._failure(error) from error

    def map(self, page_bytes: int, page_token_bytes: int) -> Slots:
        """Maps the segment, whose pages are of this size from the first call on, in any server.

        Raises:
            ConfigError: it has pages of another size, there is not room for one, or it cannot be mapped.
        """
        wanted = _FORMAT.pack(page_bytes, page_token_bytes)
        self._lock_whole(locks := SlotLocks(self.descriptor))
        try:
            is_new = self._read(_HAS_FORMAT_AT, 1) == b"\0"
            if is_new and _count_slots(self.n_bytes, _slot_bytes(page_bytes, page_token_bytes)) < 1:
                self._path.unlink(missing_ok=True)  # so that the next start may give another size
                raise self._unusable(f"{self.n_bytes} bytes do not hold a page of {page_bytes}; give a larger size")
            if is_new:
                os.pwrite(self.descriptor, wanted, _FORMAT_AT)
                os.pwrite(self.descriptor, b"\1", _HAS_FORMAT_AT)
            found = self._read(_FORMAT_AT, _FORMAT.size)
        finally:
            locks.close()
        if found != wanted:
            n_found, n_token_bytes = _FORMAT.unpack(found)
            raise self._unusable(
                f"it has pages of {n_found} bytes and {n_token_bytes // 4} tokens, and those of this model have "
                f"{page_bytes} and {page_token_bytes // 4}; give another name, or remove the file {self._path}"
            )
        try:
            return Slots.map(self.descriptor, self.n_bytes, page_bytes, page_token_bytes)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Closes the file, which stays. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _open(self) -> int:
        """Opens the file, and makes it if nobody has. Raises ``OSError`` and ``ConfigError``."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                self._check_owner(os.fstat(descriptor))
                self.descriptor = descriptor
                self._lock_whole(locks := SlotLocks(descriptor))
                try:
                    # Another server may have failed to make it, and removed it.
                    if os.fstat(descriptor).st_nlink:
                        self._make_or_check()
                        return descriptor
                finally:
                    locks.close()
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _make_or_check(self) -> None:
        """Makes the file if it has no magic: nobody has mapped it then. For the holder of the lock."""
        found = self._read(0, len(_MAGIC))
        if not found.strip(b"\0"):
            self._make()
        elif found[:-_N_VERSION_BYTES] != _MAGIC[:-_N_VERSION_BYTES]:
            raise self._unusable(f"{self._path} is another file; give another name")
        elif found != _MAGIC:
            raise self._unusable(
                f"another version of radixkv has made it; end its servers and remove the file {self._path}, or "
                "give another name"
            )
        else:
            (n_bytes,) = _SIZE.unpack(self._read(_SIZE_AT, _SIZE.size))
            if n_bytes != self.n_bytes:
                raise self._unusable(
                    f"it was made with {n_bytes} bytes, not {self.n_bytes}; give size={n_bytes}, or end its "
                    f"servers and remove the file {self._path}"
                )
            if os.fstat(self.descriptor).st_size != n_bytes:
                raise self._unusable(f"somebody has cut the file {self._path}; remove it")

    def _make(self) -> None:
        """Makes the file anew, which may be what a process has left that was killed here."""
        try:
            os.ftruncate(self.descriptor, 0)
            require_memory(self.n_bytes, f"the shared cache {shortened(self._url)}", "give a smaller size")
            os.posix_fallocate(self.descriptor, 0, self.n_bytes)
        except (OSError, ConfigError):
            os.unlink(self._path)
            raise
        os.pwrite(self.descriptor, _SIZE.pack(self.n_bytes), _SIZE_AT)
        os.pwrite(self.descriptor, _MAGIC, 0)

    def _check_owner(self, about: os.stat_result) -> None:
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise self._unusable(
                f"{self._path} is open to other users, but pages contain prompts; it must be yours, with mode 0600"
            )
        if not stat.S_ISREG(about.st_mode):
            raise self._unusable(f"{self._path} is no file; give another name")

    def _lock_whole(self, locks: SlotLocks) -> None:
        """Waits until no other server makes the segment or decides its format. Closes the locks on failure."""
        end = time.monotonic() + _MAKING_S + self.n_bytes / _MAKING_BYTES_PER_S
        while not locks.try_lock_exclusive(WHOLE_SEGMENT):
            if time.monotonic() > end:
                locks.close()
                raise self._unusable("another server makes it, and does not go on; end that server")
            time.sleep(_PAUSE_S)

    def _read(self, at: int, n_bytes: int) -> bytes:
        return os.pread(self.descriptor, n_bytes, at)

    def _failure(self, error: OSError) -> ConfigError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            about = os.statvfs(self._path.parent)
            return self._unusable(
                f"{self._path.parent} has no room for {self.n_bytes} bytes ({about.f_bavail * about.f_frsize} are "
                "free); give a smaller size, or make it larger (docker: --shm-size)"
            )
        return self._unusable(f"{self._path}: {error.strerror}; give a folder in memory that this user can write")

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(f"the shared cache {shortened(self._url)} cannot be used: {reason}")


class Slots(NamedTuple):
    """A segment that is mapped."""

    memory: mmap.mmap
    table: SlotTable
    start: int
    """Where the first slot is."""
    slot_bytes: int

    @classmethod
    def map(cls, descriptor: int, n_bytes: int, page_bytes: int, page_token_bytes: int) -> Slots:
        """Maps a segment: a block for its header, the table, then the slots, each with a header and a page."""
        slot_bytes = _slot_bytes(page_bytes, page_token_bytes)
        n_slots = _count_slots(n_bytes, slot_bytes)
        # The kernel enters all of it now: a page's first use would take several times as long as a later one.
        memory = mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        table = SlotTable(memory, BLOCK_BYTES, n_slots)
        table_bytes = n_slots * ENTRY_BYTES
        return cls(memory, table, BLOCK_BYTES + table_bytes + -table_bytes % BLOCK_BYTES, slot_bytes)

    def value(self, slot: int, n_bytes: int) -> memoryview:
        """Returns the memory of a slot's header and page. O(1)."""
        start = self.start + slot * self.slot_bytes
        return memoryview(self.memory)[start : start + n_bytes]


def _slot_bytes(page_bytes: int, page_token_bytes: int) -> int:
    return header_bytes(page_token_bytes) + page_bytes + -page_bytes % BLOCK_BYTES


def _count_slots(n_bytes: int, slot_bytes: int) -> int:
    """Returns how many slots a segment has room for; not above 0 if it has none."""
    return (n_bytes - 2 * BLOCK_BYTES) // (slot_bytes + ENTRY_BYTES)
