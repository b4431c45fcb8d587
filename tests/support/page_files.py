"""Chains of pages, and calls of a page store that wait for their ticket."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import shake_128
from mmap import mmap
from pathlib import Path

from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.page_keys import KVIdentity, chain, namespace_key, root_key
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageStore
from radixkv.tree.node import Namespace

PAGE_SIZE = 4
PAGE_TOKEN_BYTES = 4 * PAGE_SIZE
ROOT = root_key(KVIdentity("tiny", "cpu", "avx2", "2.0", "float32", "float32", "", "page first", PAGE_SIZE))
START = namespace_key(ROOT, Namespace())
"""The key that first pages continue."""
TIMEOUT_S = 60


def tokens_of(pages: Sequence[int]) -> bytes:
    """Returns the tokens of a run of pages: ``PAGE_SIZE`` times each page's number."""
    return b"".join(page.to_bytes(4, "little") * PAGE_SIZE for page in pages)


def keys_of(pages: Sequence[int]) -> list[bytes]:
    """Returns the keys of a run of pages from the start of a prompt."""
    return chain(START, tokens_of(pages), PAGE_TOKEN_BYTES)


def page_of(key: bytes, page_bytes: int, version: int = 0) -> bytes:
    """Returns the contents of a page."""
    return shake_128(key + bytes([version])).digest(page_bytes)


def buffers(n_pages: int, page_bytes: int) -> list[memoryview]:
    """Returns slots in aligned memory, one after another."""
    slots = memoryview(mmap(-1, max(1, n_pages * page_bytes)))
    return [slots[index * page_bytes : (index + 1) * page_bytes] for index in range(n_pages)]


def wait(store: PageStore, ticket: int) -> FinishedTransfer:
    """Waits for the one transfer that is under way."""
    assert select.select([store.fileno()], [], [], TIMEOUT_S)[0], "the transfer does not finish"
    (finished,) = store.take_finished()
    assert finished.ticket == ticket
    return finished


def wait_for(store: PageStore, tickets: Collection[int]) -> dict[int, int]:
    """Waits for all transfers under way; returns the number of pages of each, in the order in which they end."""
    finished: dict[int, int] = {}
    while len(finished) < len(set(tickets)):
        assert select.select([store.fileno()], [], [], TIMEOUT_S)[0], "the transfers do not finish"
        finished |= {one.ticket: one.n_pages for one in store.take_finished()}
    assert finished.keys() == set(tickets)
    return finished


def store_run(store: PageStore, pages: Sequence[int], version: int = 0) -> int:
    """Stores a run of pages; returns how many of them the store has then."""
    keys = keys_of(pages)
    slots = buffers(len(keys), store.page_bytes)
    for key, slot in zip(keys, slots, strict=True):
        slot[:] = page_of(key, store.page_bytes, version)
    return wait(store, store.store(keys, tokens_of(pages), slots)).n_pages


def load_run(store: PageStore, pages: Sequence[int]) -> list[bytes]:
    """Loads a run of pages; returns the contents of those that were read."""
    slots = buffers(len(pages), store.page_bytes)
    finished = wait(store, store.load(keys_of(pages), tokens_of(pages), slots))
    return [bytes(slot) for slot in slots[: finished.n_pages]]


@contextmanager
def file_store(
    path: Path, *, page_bytes: int = 4096, max_bytes: int = 2**30, **settings: int
) -> Iterator[FileStore]:
    """Opens a store, and closes it without dropping stores."""
    store = FileStore(
        path, page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES, max_bytes=max_bytes, **settings
    )
    try:
        yield store
    finally:
        store.close(TIMEOUT_S)


def page_files(path: Path) -> list[Path]:
    """Returns the page files in a folder, and temporary ones."""
    return sorted(file for file in path.glob("??/*") if file.is_file())


def file_of(path: Path, pages: Sequence[int]) -> Path:
    """Returns the file of the last page of a run."""
    name = keys_of(pages)[-1].hex()
    return path / name[:2] / name
