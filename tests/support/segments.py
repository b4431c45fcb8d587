"""Stores in memory that servers share: in a test's own folder, with and without the checksum behind the locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.runtime.tiers.stores.page_value import PageHeader
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from support.page_files import PAGE_TOKEN_BYTES, TIMEOUT_S

BLOCK_BYTES = 4096


class UncheckedHeader(PageHeader):
    """Takes every page for the right one, so that a test sees whether the locks and the commit word suffice."""

    def check(self, header: memoryview, key: bytes, tokens: bytes, page: memoryview) -> None:
        pass

    def is_of(self, header: memoryview, key: bytes, tokens: bytes) -> bool:
        return True


def segment_url(folder: Path, n_bytes: int) -> str:
    return f"shm://kv?size={n_bytes}&folder={folder}"


def segment_bytes(n_pages: int, page_bytes: int) -> int:
    """Returns the size of a segment that holds so many pages."""
    return 3 * BLOCK_BYTES + n_pages * (24 + BLOCK_BYTES + page_bytes + -page_bytes % BLOCK_BYTES)


def open_memory_store(
    folder: Path, n_pages: int = 50, page_bytes: int = 512, *, is_checked: bool = True, n_threads: int = 2
) -> SharedMemoryStore:
    store = SharedMemoryStore(
        Segment(segment_url(folder, segment_bytes(n_pages, page_bytes))),
        "the shared memory",
        page_bytes=page_bytes,
        page_token_bytes=PAGE_TOKEN_BYTES,
        n_threads=n_threads,
    )
    if not is_checked:
        store._header = UncheckedHeader(page_bytes, PAGE_TOKEN_BYTES)
    return store


@contextmanager
def memory_store(
    folder: Path, n_pages: int = 50, page_bytes: int = 512, *, n_threads: int = 2
) -> Iterator[SharedMemoryStore]:
    """Opens a store, and closes it without dropping stores."""
    store = open_memory_store(folder, n_pages, page_bytes, n_threads=n_threads)
    try:
        yield store
    finally:
        store.close(TIMEOUT_S)
