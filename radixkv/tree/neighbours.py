"""Search for the cached pages that share the most leading tokens with a page that is not cached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from radixkv.tree.children import Children
from radixkv.tree.node import TOKEN_BYTES, Node


class Neighbour(NamedTuple):
    """A cached page beside a page that is not cached, both after the same tokens."""

    node: Node
    """The node that contains the cached page."""
    tokens: bytes
    """The cached page's tokens."""
    n_common: int
    """Leading tokens that both pages have in common."""
    is_computed: bool
    """Whether the KV of the cached page is computed."""
    place: int = 0
    """Number of the cached page among those of the node."""


class Neighbours(NamedTuple):
    """The cached pages next to a page in byte order. No cached page shares more leading tokens than these do."""

    below: Neighbour | None
    above: Neighbour | None

    @property
    def nearest(self) -> Neighbour | None:
        """The one that shares more leading tokens."""
        return _nearest(one for one in self if one is not None)

    @property
    def nearest_computed(self) -> Neighbour | None:
        """The computed neighbour that shares more leading tokens."""
        return _nearest(one for one in self if one is not None and one.is_computed)


_FEW_BYTES = 512
"""So many bytes are compared as numbers, which is faster than by halves."""
_NO_NEIGHBOURS = Neighbours(None, None)


def find_neighbours(node: Node, n_pages: int, page: bytes, page_bytes: int, *, min_common: int = 0) -> Neighbours:
    """Returns the neighbours of ``page`` among the cached pages that continue the first ``n_pages`` of a node.

    O(log children).

    Args:
        node: where the match ends.
        n_pages: pages of the node that match.
        page: the tokens after the match, at most a page of them; no cached page that continues the match equals it.
        page_bytes: bytes of a whole page's tokens.
        min_common: neighbours that share fewer leading tokens are left out.
    """
    if len(page) < min_common * TOKEN_BYTES:
        return _NO_NEIGHBOURS
    start = page[: min_common * TOKEN_BYTES]
    if n_pages < len(node.pages):
        following = bytes(node.key[n_pages * page_bytes : (n_pages + 1) * page_bytes])
        if not following.startswith(start):
            return _NO_NEIGHBOURS
        n_common = n_common_tokens(page, following)
        only = Neighbour(node, following, n_common, node.n_computed > n_pages, n_pages)
        return Neighbours(only, None) if following < page else Neighbours(None, only)
    children = node.children
    if children is None:
        return _NO_NEIGHBOURS
    below, above = children.neighbours(page, start)
    if below is None and above is None:
        return _NO_NEIGHBOURS
    return Neighbours(_neighbour(children, below, page), _neighbour(children, above, page))


def _neighbour(children: Children[Node], key: bytes | None, page: bytes) -> Neighbour | None:
    if key is None:
        return None
    child = children[key]
    return Neighbour(child, key, n_common_tokens(page, key), child.n_computed > 0)


def _nearest(neighbours: Iterable[Neighbour]) -> Neighbour | None:
    # If both share as many tokens, prefer one that is a whole node: a lease on it splits nothing.
    return max(neighbours, key=lambda one: (one.n_common, len(one.node.pages) == 1, one.tokens), default=None)


def n_common_tokens(first: bytes, second: bytes) -> int:
    """Returns how many leading tokens two sequences have in common. O(bytes)."""
    start, end = 0, min(len(first), len(second))
    while end - start > _FEW_BYTES:  # halves are compared by ``memcmp``, which is faster than numbers
        middle = (start + end) // 2
        if first[start:middle] == second[start:middle]:
            start = middle
        else:
            end = middle
    # In little-endian numbers the first bytes are the lowest, so the lowest bit that differs ends what is common.
    difference = int.from_bytes(first[start:end], "little") ^ int.from_bytes(second[start:end], "little")
    n_bytes = start + ((difference & -difference).bit_length() - 1) // 8 if difference else end
    return n_bytes // TOKEN_BYTES
