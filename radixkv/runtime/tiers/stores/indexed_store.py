"""What page stores of any kind share: the index of their pages, what leaves it, and their warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from radixkv.runtime.tiers.stores.page_index import IndexedPage, PageIndex
from radixkv.runtime.tiers.stores.page_keys import StateKeys
from radixkv.runtime.tiers.stores.page_store import PageCounts, StoreHealth

logger = logging.getLogger(__name__)


class IndexedStore:
    """The part of a ``PageStore`` that needs no transfer: which pages it has, and what has become of the others.

    Unless a subclass says otherwise, no other server uses the store.

    Args:
        page_bytes: size of a page.
        page_token_bytes: bytes of one page's tokens.
    """

    def __init__(self, page_bytes: int, page_token_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.counts = PageCounts()
        self._page_token_bytes = page_token_bytes
        self._index = PageIndex()
        self._n_removals = 0
        """Calls of ``remove`` and ``clear``. What began before the last one adds no more pages."""
        self._removed: list[bytes] | None = None
        """Keys of the pages that have left the index, for ``take_removed``; None before its first call."""
        self._lock = threading.Lock()
        """Guards the fields above. Never held during a call that may hang."""

    @property
    def n_pages(self) -> int:
        """See ``PageStore``."""
        return len(self._index)

    @property
    def n_bytes(self) -> int:
        """See ``PageStore``."""
        return self._index.n_bytes

    @property
    def health(self) -> StoreHealth | None:
        """See ``PageStore``."""
        return None

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        """See ``PageStore``."""
        return None

    def run(self, keys: Sequence[bytes]) -> int:
        """See ``PageStore``."""
        return self._index.run(keys)

    def has(self, key: bytes) -> bool:
        """See ``PageStore``."""
        return key in self._index

    def spare(self, keys: Sequence[bytes]) -> None:
        """See ``PageStore``."""
        with self._lock:
            self._index.spare(keys)

    def take_removed(self) -> list[bytes]:
        """See ``PageStore``."""
        with self._lock:
            removed, self._removed = self._removed or [], []
            return removed

    def _pages(
        self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]
    ) -> list[tuple[bytes, bytes, memoryview]]:
        """Returns key, tokens and buffer of each page."""
        size = self._page_token_bytes
        assert len(tokens) == len(keys) * size
        assert all(buffer.nbytes == self.page_bytes for buffer in buffers)
        page_tokens = [tokens[first : first + size] for first in range(0, len(tokens), size)]
        return list(zip(keys, page_tokens, buffers, strict=True))

    def _take_all(self) -> list[IndexedPage]:
        """Takes all pages out of the index, and returns them. For holders of the lock, as the next two methods."""
        files, self._index = self._index.files(), PageIndex()
        self._note_removed(files)
        return files

    def _take_below(self, key: bytes, leading: Sequence[bytes]) -> list[IndexedPage]:
        """Takes the pages out of the index that ``remove`` removes, and returns them."""
        files = self._index.remove_below(key, leading)
        self._note_removed(files)
        return files

    def _note_removed(self, files: Iterable[IndexedPage]) -> None:
        """Notes for ``take_removed`` that pages have left the index."""
        if self._removed is not None:
            self._removed += (file.key for file in files)

    def _note_lost(self, key: bytes) -> bool:
        """Forgets a page that is damaged or has vanished, and counts it; returns False if the index has it not."""
        with self._lock:
            if (file := self._index.remove(key)) is None:
                return False
            self.counts = self.counts._replace(n_lost=self.counts.n_lost + 1)
            self._note_removed((file,))
            return True


class RareWarnings:
    """Warnings of one kind, from any thread; each says how many were left out since the last.

    Args:
        pause_s: shortest time between two of them.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._next = 0.0
        self._n_left_out = 0

    def add(self, text: str, error: Exception) -> None:
        """Logs a warning with its reason, unless there was one lately. O(1)."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._n_left_out += 1
                return
            self._next, n_left_out, self._n_left_out = now + self._pause_s, self._n_left_out, 0
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        more = f" ({n_left_out} more since the last warning)" if n_left_out else ""
        logger.warning("%s: %s%s", text, reason, more)
