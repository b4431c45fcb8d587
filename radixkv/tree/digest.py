"""Chained page digests, for explanations, events and routing. They never decide what is shared."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from radixkv.tree.node import Namespace, Node

Digest = Callable[[int, bytes], int]
"""(digest of all that comes before, a page's bytes) -> digest up to there, an unsigned 64-bit number."""


def chained_xxh3_64(parent: int, page: bytes) -> int:
    """xxh3_64 of the page, seeded with the digest of what comes before it."""
    return xxh3_64_intdigest(page, parent)


def namespace_digest(digest: Digest, namespace: Namespace) -> int:
    """Where a namespace's chain starts; its representation tells the fields apart."""
    return digest(0, repr(tuple(namespace)).encode())


def digest_at(digest: Digest, node: Node, n_pages: int, width: int) -> int:
    """The digest of the path that ends after ``n_pages`` of ``node``; ``width`` is a page's bytes.

    Each page is digested once in a node's life and remembered: O(pages of the path not digested before).
    """
    lacking: list[tuple[Node, int]] = []
    while node.parent is not None and (not n_pages or node.digests is None or len(node.digests) < n_pages):
        if n_pages:
            lacking.append((node, n_pages))
        node = node.parent
        n_pages = len(node.pages)
    assert node.digests is not None
    value = node.digests[n_pages - 1]
    for lower, n_wanted in reversed(lacking):
        if lower.digests is None:
            lower.digests = array("Q")
        elif lower.digests:
            value = lower.digests[-1]
        for index in range(len(lower.digests), n_wanted):
            value = digest(value, bytes(lower.key[index * width : (index + 1) * width]))
            lower.digests.append(value)
    return value


class RecentDigests:
    """The last ``capacity`` digests that were added. Memory: 120 to 260 bytes each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[int, None] = OrderedDict()

    def add(self, digest: int) -> None:
        """Remembers a digest, and forgets the one that was added longest ago if there are too many. O(1)."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def __contains__(self, digest: int) -> bool:
        return digest in self._digests
