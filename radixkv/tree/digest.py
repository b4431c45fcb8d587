"""Chained page digests, which name cached prefixes in explanations, events and routing.

Digests never decide what is shared: a match compares tokens.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from radixkv.tree.node import Namespace, Node


def chained_xxh3_64(parent_digest: int, page: bytes | bytearray) -> int:
    """Returns the digest of a page and of everything before it: xxh3_64 of its bytes, seeded with
    ``parent_digest``."""
    return xxh3_64_intdigest(page, parent_digest)


def namespace_digest(namespace: Namespace) -> int:
    """Returns the first link of a namespace's chain.

    Digests the ``repr`` of the fields, so that no two namespaces give the same bytes.
    """
    return chained_xxh3_64(0, repr(tuple(namespace)).encode())


def digest_at(node: Node, n_pages: int, page_bytes: int) -> int:
    """Returns the digest of the path that ends after ``n_pages`` pages of ``node``.

    Nodes remember their digests, so each page is digested once while it is in the tree: O(pages of the path without
    a digest).
    """
    without: list[tuple[Node, int]] = []
    while not (n_pages and node.digests) and node.parent is not None:
        if n_pages:
            without.append((node, n_pages))
        node = node.parent
        n_pages = len(node.pages)
    assert node.digests
    value = _continue(node, node.digests, n_pages, page_bytes)
    for lower, n_lower in reversed(without):
        lower.digests = array("Q")
        value = _continue(lower, lower.digests, n_lower, page_bytes, value)
    return value


def _continue(node: Node, digests: array[int], n_pages: int, page_bytes: int, value: int = 0) -> int:
    """Makes a node's digests at least ``n_pages`` long and returns the last of these.

    Args:
        value: the digest of everything before the node, if it has none of its own.
    """
    if len(digests) >= n_pages:
        return digests[n_pages - 1]  # for 0 pages the node is a root, and this is its only digest
    if digests:
        value = digests[-1]
    key = node.key
    for start in range(len(digests) * page_bytes, n_pages * page_bytes, page_bytes):
        value = chained_xxh3_64(value, key[start : start + page_bytes])
        digests.append(value)
    return value
