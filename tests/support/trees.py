"""Sequences in a radix tree, without a cache around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack

from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree


def ids(*tokens: int) -> bytes:
    return pack(f"<{len(tokens)}i", *tokens)


def insert(tree: RadixTree, tokens: bytes, pages: Sequence[int], namespace: Namespace = Namespace()) -> Lease:
    """Caches whole pages of tokens as computed ones; returns the open lease.

    Args:
        tree: where they are cached.
        tokens: of one page or more.
        pages: an index for each page; those of pages that are cached already are not used.
        namespace: of the tokens.
    """
    lease = tree.lease(namespace, tokens)
    rest = tokens[4 * lease.n_tokens :]
    tree.commit(lease, rest, pages[len(pages) - len(pages) * len(rest) // len(tokens) :])
    tree.mark_computed(lease, len(tokens) // 4)
    return lease


def tree_of(sequences: Iterable[tuple[str, list[int]]], page_size: int) -> RadixTree:
    """Returns a tree with sequences: the salt and the numbers of their pages, each of equal tokens."""
    tree, n_pages = RadixTree(page_size), 0
    for salt, numbers in sequences:
        tokens = ids(*(number for number in numbers for _ in range(page_size)))
        pages = range(n_pages, n_pages + len(numbers))
        n_pages += len(numbers)
        tree.release(insert(tree, tokens, pages, Namespace(salt=salt)))
    return tree
