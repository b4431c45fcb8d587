"""Reading and writing of a page's file."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat

from radixkv.runtime.tiers.stores.page_value import BLOCK_BYTES, DamagedPage, PageHeader, header_bytes


class PageFormat:
    """Reads and writes files of one page each, in any thread. A file is a header and the page.

    Args:
        page_bytes: size of a page.
        page_token_bytes: bytes of a page's tokens.
        is_direct: whether the file system takes direct I/O, which is used for pages that are aligned: it moves
            multiples of ``BLOCK_BYTES``, from and to addresses that are multiples of it.
    """

    def __init__(self, page_bytes: int, page_token_bytes: int, *, is_direct: bool) -> None:
        self._header = PageHeader(page_bytes, page_token_bytes)
        self._is_direct = is_direct and page_bytes % BLOCK_BYTES == 0

    def write(self, folder: int, name: str, key: bytes, tokens: bytes, page: memoryview, tick: int) -> None:
        """Makes a file, whose modification time becomes ``tick``, in nanoseconds.

        Nothing is synchronised: a crash of the machine may damage the file, and its checksum then shows it.

        Raises:
            OSError: the file exists, or cannot be written. What is there of it remains.
        """
        header = self._empty_header()
        header[:] = self._header.make(key, tokens, page)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags(page), 0o600, dir_fd=folder)
        try:
            n_written, n_bytes = os.writev(descriptor, [header, page]), len(header) + page.nbytes
            if n_written < n_bytes:
                raise OSError(f"only {n_written} of {n_bytes} bytes were written; the disk may be full")
            os.utime(descriptor, ns=(tick, tick))
        finally:
            os.close(descriptor)

    def read(self, folder: int, name: str, key: bytes, tokens: bytes, page: memoryview, tick: int) -> None:
        """Reads a file's page into ``page``, and sets the modification time to ``tick`` where that is allowed.

        Raises:
            DamagedPage: the file is no regular one, too short, of another format, key or tokens, or its checksum is
                wrong.
            OSError: the file cannot be read.
        """
        header = self._empty_header()
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise DamagedPage("it is no regular file")  # opening a FIFO would wait for a writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | self._flags(page)
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            n_read, n_bytes = os.readv(descriptor, [header, page]), len(header) + page.nbytes
            if n_read < n_bytes:
                raise DamagedPage(f"it has {n_read} bytes, not {n_bytes}")
            self._header.check(header, key, tokens, page)
            with contextlib.suppress(OSError):
                os.utime(descriptor, ns=(tick, tick))
        finally:
            os.close(descriptor)

    def _empty_header(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._header.n_bytes))  # mapped memory is aligned, as direct I/O needs it

    def _flags(self, page: memoryview) -> int:
        is_aligned = ctypes.addressof(ctypes.c_char.from_buffer(page)) % BLOCK_BYTES == 0
        return os.O_DIRECT if self._is_direct and is_aligned else 0


def round_up_to_blocks(n_bytes: int) -> int:
    """Returns the bytes that ``n_bytes`` occupy on disk."""
    return n_bytes + -n_bytes % BLOCK_BYTES


def file_bytes(page_bytes: int, page_token_bytes: int) -> int:
    """Returns the bytes that the file of a page occupies on disk."""
    return round_up_to_blocks(header_bytes(page_token_bytes) + page_bytes)
