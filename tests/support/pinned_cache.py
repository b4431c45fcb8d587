"""A page cache with pins, filled without an engine."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.lifetimes.pins import TierPins
from radixkv.tree.node import Namespace
from support.engine import token_bytes

PAGE_SIZE = 2


class PinnedCache:
    """A cache of 16 pages of two tokens, and a clock that stands still."""

    def __init__(self, budget: float = 0.25, n_pages: int = 16) -> None:
        self.now = 0.0
        self.cache = PageCache(n_pages, PAGE_SIZE)
        self.pins = TierPins(self.cache, budget, lambda: self.now)

    def add(self, first: int, n_pages: int, namespace: Namespace = Namespace()) -> bytes:
        """Caches a sequence that begins with token ``first``, and counts up; returns its tokens."""
        return self.add_tokens(list(range(first, first + n_pages * PAGE_SIZE)), namespace)

    def add_tokens(self, ids: list[int], namespace: Namespace = Namespace()) -> bytes:
        tokens = bytearray(token_bytes(ids))
        blocks = self.cache.open(namespace, bytes(tokens))
        assert self.cache.reserve(blocks, len(ids) // PAGE_SIZE)
        self.cache.commit(blocks, tokens, len(ids), 0)
        self.cache.mark_computed(blocks, len(ids), 0)
        self.cache.free_replaced(blocks, 0)
        self.cache.close(blocks)
        return bytes(tokens)

    def pin(self, tokens: bytes, seconds: float = 10.0, namespace: Namespace = Namespace()) -> None:
        self.pins.pin(namespace, tokens, self.now + seconds)
        self.cache.check([])

    def pinned(self, tokens: bytes, namespace: Namespace = Namespace()) -> int:
        """Returns the leading pages of a sequence that are pinned."""
        return self.pins.find(namespace, tokens).n_tokens // PAGE_SIZE

    def cached(self, tokens: bytes, namespace: Namespace = Namespace()) -> int:
        """Returns the leading pages of a sequence that are cached."""
        return self.cache.tree.match(namespace, tokens) // PAGE_SIZE

    def squeeze(self, n_left: int) -> None:
        """Lets a request take all pages but ``n_left``, then give them back."""
        blocks = self.cache.open(Namespace(), b"")
        assert self.cache.reserve(blocks, self.cache.n_pages - n_left), "every page can be had"
        self.cache.close(blocks)
