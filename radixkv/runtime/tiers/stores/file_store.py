"""A page store of plain files, one a page."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from radixkv.errors import ConfigError
from radixkv.runtime.tiers.stores.indexed_store import IndexedStore, RareWarnings
from radixkv.runtime.tiers.stores.page_file import PageFormat, file_bytes
from radixkv.runtime.tiers.stores.page_folder import (
    TEMPORARY_SUFFIX,
    PageFolder,
    name_of,
    unusable,
)
from radixkv.runtime.tiers.stores.page_index import IndexedPage, PageIndex
from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, Removal
from radixkv.runtime.tiers.stores.page_value import DamagedPage
from radixkv.runtime.tiers.stores.transfer_threads import STUCK_S, Transfer, TransferThreads, Urgency

logger = logging.getLogger(__name__)

N_THREADS = 4
MAX_PENDING_BYTES = 2**30
"""Bytes of pages that may wait to be written at once."""
MAX_WRITE_FAILURES = 3
"""After this many failed writes in a row, nothing is written for ``PAUSE_S``."""
FILES_PER_REMOVAL = 1024
"""Files that one step deletes; ``close`` may wait for it."""
PAUSE_S = 60.0
"""Also the shortest time between two warnings of one kind."""

LOAD_TIMEOUT_S = STUCK_S
"""Limit of a load, beside ``LOAD_PAGE_S`` for each page and the time of its bytes at ``LOAD_BYTES_PER_S``, also for
the pages that wait before it. What has not been read then is a miss."""
LOAD_PAGE_S = 0.01
LOAD_BYTES_PER_S = 64 << 20

_LOST = (errno.EIO, errno.ENOENT, errno.ENOTDIR)
"""Errors of a page that no later attempt will read. ENOTDIR: a file in place of the subfolder."""


class FileStore(IndexedStore):
    """A ``PageStore`` of plain files in a folder that no other server uses at the same time.

    A file is written under a temporary name, then renamed. Nothing is synchronised: if a crash of the machine
    damages a page, its checksum is wrong. A file that is not the page that its name promises is removed, with a
    warning.

    Args:
        path: the folder; made if there is none, with mode 0700.
        page_bytes: size of a page.
        page_token_bytes: bytes of one page's tokens.
        max_bytes: bound of what the files occupy, with those of other models. ``PageIndex`` says which goes first.
        n_threads: pages that are read and written at once.
        max_pending_bytes: bound of the pages that wait to be written.

    Raises:
        ConfigError: the folder cannot be used, or the bound is less than one page.

    Cost: reads the names and attributes of all files in the folder.
    """

    def __init__(
        self,
        path: Path,
        *,
        page_bytes: int,
        page_token_bytes: int,
        max_bytes: int,
        n_threads: int = N_THREADS,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._file_bytes = file_bytes(page_bytes, page_token_bytes)
        if max_bytes < self._file_bytes:
            raise ConfigError(
                f"the cache folder may take {max_bytes} bytes, but a page takes {self._file_bytes}; "
                "set --cache-dir-size higher"
            )
        super().__init__(page_bytes, page_token_bytes)
        self._max_bytes = max_bytes
        self._max_waiting_stores = max(n_threads, max_pending_bytes // page_bytes)
        self._reserved_bytes = 0
        """Bytes of pages that are being written or removed, so that the index does not have them."""
        self._n_write_failures = 0
        """Writes that failed since the last that succeeded."""
        self._writes_resume = 0.0
        """End of the pause, on ``time.monotonic``."""
        self._names = threading.Lock()
        """Held while files get and lose their names, by threads of transfers only; taken before ``_lock``."""
        self._read_buffers = [memoryview(mmap.mmap(-1, page_bytes)) for _ in range(n_threads)]
        """Where the threads read a page, which may hang. The caller's buffer may be another page's by then."""
        self._reads: dict[bytes, float] = {}
        """Keys of the pages that are being read, and since when, on ``time.monotonic``."""
        self._late_warnings = RareWarnings(PAUSE_S)
        self._read_warnings, self._write_warnings = RareWarnings(PAUSE_S), RareWarnings(PAUSE_S)
        with contextlib.ExitStack() as on_failure:
            self._folder = PageFolder(path)
            on_failure.callback(self._folder.close)
            self._format = PageFormat(page_bytes, page_token_bytes, is_direct=self._folder.is_direct)
            try:
                self._index = PageIndex(self._folder.files())
                self._make_room(0)
            except OSError as error:
                raise unusable(path, error) from error
            self._threads = TransferThreads(n_threads, "page-files")
            on_failure.pop_all()

    def run(self, keys: Sequence[bytes]) -> int:
        """See ``PageStore``. A page whose read hangs is not found."""
        n_pages, stuck = super().run(keys), self._stuck()
        return next((n for n, key in enumerate(keys[:n_pages]) if key in stuck), n_pages) if stuck else n_pages

    def has(self, key: bytes) -> bool:
        """See ``PageStore``. A page whose read hangs is not found."""
        return super().has(key) and key not in self._stuck()

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``. Takes no longer than ``LOAD_TIMEOUT_S`` and the constants after it say."""
        pages = [] if self._threads.are_stuck else self._pages(keys, tokens, buffers)
        tick = time.time_ns()
        with self._lock:
            for key, *_ in pages:
                self._index.touch(key, tick)  # so that they are not removed before they are read
        n_before = self._threads.n_waiting(Urgency.LOAD)
        page_s = LOAD_PAGE_S + self.page_bytes / LOAD_BYTES_PER_S
        steps = [partial(self._load_page, *page) for page in pages]
        return self._threads.start(
            Urgency.LOAD, steps, len(steps), LOAD_TIMEOUT_S + (n_before + len(steps)) * page_s
        )

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``. At most ``max_pending_bytes`` wait at once."""
        n_accepted = max(0, self._max_waiting_stores - self._threads.n_waiting(Urgency.STORE))
        pages = [] if self._threads.are_stuck else self._pages(keys, tokens, buffers)[:n_accepted]
        run = frozenset([keys[0][DIGEST_BYTES:], *(key[:DIGEST_BYTES] for key in keys)]) if pages else frozenset()
        if pages:
            with self._lock:
                self._index.touch(keys[0][DIGEST_BYTES:], time.time_ns())  # the page before them, if it is one
        steps = [partial(self._store_page, *page, run, self._n_removals) for page in pages]
        return self._threads.start(Urgency.STORE, steps, len(steps), math.inf)

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """See ``PageStore``."""
        with self._lock:
            files = self._take_below(key, leading)
            return Removal(self._start_removal(files), len(files))

    def clear(self) -> int:
        """See ``PageStore``."""
        with self._lock:
            return self._start_removal(self._take_all())

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        n_given_up = self._threads.n_given_up
        finished = self._threads.take_finished()
        if self._threads.n_given_up > n_given_up:
            late = TimeoutError("the file system does not respond, or is slow")
            self._late_warnings.add(f"pages of {self._folder.path} are computed, or not written", late)
        return finished

    def fileno(self) -> int:
        """See ``PageStore``."""
        return self._threads.fileno()

    def close(self, timeout_s: float) -> None:
        """See ``PageStore``. Takes at most ``timeout_s`` and ``transfer_threads.LAST_STEP_S``.

        A thread that hangs in the file system even then keeps its buffer in use, and the folder locked until the
        process ends.
        """
        if self._threads.close(timeout_s):
            self._folder.close()
        else:
            logger.warning("the file system of %s does not respond", self._folder.path)

    def _stuck(self) -> set[bytes]:
        """Returns the keys of pages whose read hangs. O(threads)."""
        if not self._reads:
            return set()
        latest = time.monotonic() - STUCK_S
        return {key for key, began in list(self._reads.items()) if began < latest}

    def _load_page(self, key: bytes, tokens: bytes, page: memoryview, transfer: Transfer) -> bool:
        tick = time.time_ns()
        if key not in self._index:
            return False
        buffer = self._read_buffers.pop()
        self._reads.setdefault(key, time.monotonic())
        try:
            self._format.read(self._folder.descriptor, name_of(key), key, tokens, buffer, tick)
            # numpy copies without Python's lock.
            is_in_time = transfer.apply(
                lambda: np.copyto(np.frombuffer(page, np.uint8), np.frombuffer(buffer, np.uint8))
            )
        except (DamagedPage, OSError) as error:
            self._fail_read(key, error)
            return False
        finally:
            self._reads.pop(key, None)
            self._read_buffers.append(buffer)
        with self._lock:
            self._index.touch(key, tick)
        return is_in_time

    def _fail_read(self, key: bytes, error: DamagedPage | OSError) -> None:
        """Warns, and removes the page unless a later attempt may read it."""
        if isinstance(error, DamagedPage) or error.errno in _LOST:
            with self._names:
                if not self._note_lost(key):
                    return  # it was removed while it was read
                with contextlib.suppress(OSError):
                    self._unlink(key)
        self._read_warnings.add(f"the page {name_of(key)} in {self._folder.path} is a miss", error)

    def _store_page(
        self,
        key: bytes,
        tokens: bytes,
        page: memoryview,
        run: Collection[bytes],
        n_removals: int,
        transfer: Transfer,
    ) -> bool:
        tick = time.time_ns()
        with self._lock:
            if n_removals != self._n_removals:
                return False
            if key in self._index:
                self._index.touch(key, tick)
                return True
            if time.monotonic() < self._writes_resume:
                return False
        try:
            with self._names:
                if not self._make_room(self._file_bytes, run):
                    return False
            is_stored = False
            try:
                is_stored = self._write_page(key, tokens, page, n_removals, tick, transfer)
            finally:
                if not is_stored:
                    with self._lock:
                        self._reserved_bytes -= self._file_bytes
            return is_stored
        except OSError as error:
            self._fail_write(error)
            return False

    def _write_page(
        self, key: bytes, tokens: bytes, page: memoryview, n_removals: int, tick: int, transfer: Transfer
    ) -> bool:
        """Makes the file under a temporary name, and renames it unless the store was dropped meanwhile.

        Returns whether the page is in the store, which then has taken over its reserved bytes.
        """
        folder, name = self._folder.descriptor, name_of(key)
        temporary = f"{name}.{threading.get_native_id()}{TEMPORARY_SUFFIX}"
        try:
            self._folder.make_subfolder(key)
            self._format.write(folder, temporary, key, tokens, page, tick)
            with self._names:
                # The buffer may be another page's once the transfer is over.
                if n_removals != self._n_removals or transfer.is_over:
                    return False
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                with self._lock:
                    is_dropped = n_removals != self._n_removals
                    if not is_dropped:
                        self._note_written(key, tick)
                if is_dropped:
                    self._unlink(key)
                return not is_dropped
        finally:
            with contextlib.suppress(OSError):  # there is none if it was renamed
                os.unlink(temporary, dir_fd=folder)

    def _note_written(self, key: bytes, tick: int) -> None:
        if key not in self._index:  # another thread may have written the same page meanwhile
            self._index.add(IndexedPage(key, self._file_bytes, tick))
            self.counts = self.counts._replace(n_written=self.counts.n_written + 1)
        self._reserved_bytes -= self._file_bytes  # with the index, so that no byte counts twice
        self._n_write_failures = 0

    def _fail_write(self, error: OSError) -> None:
        """Warns, and pauses the writes if several have failed in a row."""
        with self._lock:
            self._n_write_failures += 1
            if self._n_write_failures >= MAX_WRITE_FAILURES:
                self._writes_resume = time.monotonic() + PAUSE_S
        self._write_warnings.add(f"a page cannot be written to {self._folder.path}", error)

    def _make_room(self, n_bytes: int, kept: Collection[bytes] = ()) -> bool:
        """Reserves ``n_bytes`` within the bound, for which pages are removed; returns whether that succeeded.

        Args:
            n_bytes: how many.
            kept: digests of pages that are not removed: without them, what is to be written is of no use.

        Raises:
            OSError: a page cannot be removed.
        """
        while True:
            with self._lock:
                if self._index.n_bytes + self._reserved_bytes + n_bytes <= self._max_bytes:
                    self._reserved_bytes += n_bytes
                    return True
                file = self._index.first_to_go()
                if file is None or file.digest in kept:
                    return False
                self._index.remove(file.key)
                self._reserved_bytes += file.n_bytes
                n_removals = self._n_removals
            is_removed = False
            try:
                self._unlink(file.key)
                is_removed = True
            finally:
                with self._lock:
                    self._reserved_bytes -= file.n_bytes
                    if is_removed or n_removals != self._n_removals:
                        self._note_removed((file,))
                    else:
                        self._index.add(file)

    def _start_removal(self, files: Sequence[IndexedPage]) -> int:
        """Starts to delete files that have left the index."""
        self._n_removals += 1
        self._reserved_bytes += sum(file.n_bytes for file in files)
        steps = [
            partial(self._delete, files[first : first + FILES_PER_REMOVAL])
            for first in range(0, len(files), FILES_PER_REMOVAL)
        ]
        return self._threads.start(Urgency.REMOVAL, steps, len(files), None)

    def _delete(self, files: Sequence[IndexedPage], _: Transfer) -> bool:
        for file in files:
            with self._names:
                if file.key not in self._index:  # else it was stored again meanwhile
                    try:
                        self._unlink(file.key)
                    except OSError as error:
                        self._write_warnings.add(f"a page cannot be removed from {self._folder.path}", error)
                with self._lock:
                    self._reserved_bytes -= file.n_bytes
        return True

    def _unlink(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name_of(key), dir_fd=self._folder.descriptor)
