"""The bytes of a page outside the process: a header that says which page it is, then the page."""

from __future__ import annotations

import struct

import numpy as np
from xxhash import xxh3_128

from radixkv.errors import RadixKVError
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES

BLOCK_BYTES = 4096
"""A header is a multiple of this, so that direct I/O can move it."""

_MAGIC = b"radixkv\n"
_FORMAT_VERSION = 1
_FIELDS = struct.Struct(f"<8sIIQ{KEY_BYTES}s")
_CHECKSUM_BYTES = 16
KEY_AT = _FIELDS.size - KEY_BYTES
"""Where a header has the page's key."""


class DamagedPage(RadixKVError):
    """A value that is not the whole page that its name promises."""


class PageHeader:
    """Makes and checks headers of pages, in any thread.

    A header has magic, format version, sizes, key and the page's tokens; its last 16 bytes are the xxh3_128 of all
    other bytes of header and page. A reader knows everything in the header but the checksum, so it compares the
    header as a whole.

    Args:
        page_bytes: size of a page.
        page_token_bytes: bytes of a page's tokens.
    """

    def __init__(self, page_bytes: int, page_token_bytes: int) -> None:
        self.n_bytes = header_bytes(page_token_bytes)
        """Size of a header."""
        self._page_bytes = page_bytes
        self._page_token_bytes = page_token_bytes

    def make(self, key: bytes, tokens: bytes, page: memoryview) -> bytes:
        """Returns the header of a page. O(bytes of the page)."""
        known = self._without_checksum(key, tokens)
        return known + _checksum(known, page)

    def is_of(self, header: memoryview, key: bytes, tokens: bytes) -> bool:
        """Returns whether a header is that of a page, whose bytes and checksum are not compared. O(its bytes)."""
        return bytes(header)[:-_CHECKSUM_BYTES] == self._without_checksum(key, tokens)

    def check(self, header: memoryview, key: bytes, tokens: bytes, page: memoryview) -> None:
        """Compares a header and a page that were read with what they should be. O(bytes of the page).

        Raises:
            DamagedPage: they are of another format, key or tokens, or the checksum is wrong.
        """
        known = self._without_checksum(key, tokens)
        found = bytes(header)  # a memoryview compares its bytes one by one
        if found[:-_CHECKSUM_BYTES] != known:
            raise DamagedPage("its header is that of another page or format")
        if found[-_CHECKSUM_BYTES:] != _checksum(known, page):
            raise DamagedPage("its checksum is wrong")

    def _without_checksum(self, key: bytes, tokens: bytes) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _FORMAT_VERSION, self._page_token_bytes, self._page_bytes, key)
        return (fields + tokens).ljust(self.n_bytes - _CHECKSUM_BYTES, b"\0")


def header_bytes(page_token_bytes: int) -> int:
    """Returns the size of a page's header."""
    n_bytes = _FIELDS.size + page_token_bytes + _CHECKSUM_BYTES
    return n_bytes + -n_bytes % BLOCK_BYTES


def copy_page(source: memoryview, target: memoryview) -> None:
    """Copies a page without Python's lock. O(its bytes)."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _checksum(known_header: bytes, page: memoryview) -> bytes:
    checksum = xxh3_128(known_header)
    checksum.update(page)
    return checksum.digest()
