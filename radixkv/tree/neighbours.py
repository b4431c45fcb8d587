"""Search for the cached pages that share the most leading tokens with a page that is not cached."""

from __future__ import annotations

from typing import NamedTuple

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


class Neighbours(NamedTuple):
    """The cached pages next to a page in byte order. No cached page shares more leading tokens than these do."""

    below: Neighbour | None
    above: Neighbour | None

    @property
    def nearest(self) -> Neighbour | None:
        """The one that shares more leading tokens."""
        return self._choose(is_computed=False)

    @property
    def nearest_computed(self) -> Neighbour | None:
        """The same among those whose KV is computed."""
        return self._choose(is_computed=True)

    def _choose(self, *, is_computed: bool) -> Neighbour | None:
        found = [one for one in self if one is not None and (one.is_computed or not is_computed)]
        # Of equals, the one that is a node of its own already: a lease on it splits nothing.
        return max(found, key=lambda one: (one.n_common, len(one.node.pages) == 1, one.tokens), default=None)


def find_neighbours(node: Node, n_pages: int, page: bytes, page_bytes: int) -> Neighbours:
    """Returns the neighbours of ``page`` among the cached pages that continue the first ``n_pages`` of a node.

    O(log children), and a scan of a few hundred keys.

    Args:
        node: where the match ends.
        n_pages: pages of the node that match.
        page: the tokens after the match, at most a page of them; no cached page that continues the match equals it.
        page_bytes: bytes of a whole page's tokens.
    """
    if n_pages < len(node.pages):
        following = bytes(node.key[n_pages * page_bytes : (n_pages + 1) * page_bytes])
        only = Neighbour(node, following, n_common_tokens(page, following), node.n_computed > n_pages)
        return Neighbours(only, None) if following < page else Neighbours(None, only)
    children = node.children
    if children is None:
        return Neighbours(None, None)
    below, above = children.neighbours(page)
    return Neighbours(
        *(
            None
            if key is None
            else Neighbour(children[key], key, n_common_tokens(page, key), children[key].n_computed > 0)
            for key in (below, above)
        )
    )


def n_common_tokens(first: bytes, second: bytes) -> int:
    """Returns how many leading tokens two sequences have in common. O(bytes), by binary search."""
    n_common, limit = 0, min(len(first), len(second)) // TOKEN_BYTES
    while n_common < limit:
        middle = (n_common + limit + 1) // 2
        part = slice(n_common * TOKEN_BYTES, middle * TOKEN_BYTES)
        if first[part] == second[part]:
            n_common = middle
        else:
            limit = middle - 1
    return n_common
