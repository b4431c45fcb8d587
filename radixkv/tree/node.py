"""The parts that a tree is made of: namespaces, nodes and leases."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from radixkv.tree.children import Children

TOKEN_BYTES = 4
"""A token is one little-endian int32."""


class Namespace(NamedTuple):
    """What must not share pages. The position gives the type: a salt never equals an adapter."""

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    epoch: int = 0
    """Grows with each change of the weights."""


class Node:
    """A run of pages that follows its parent's; a root has none.

    What it links to is freed by ``unlink``, not by the cyclic collector, which the runtime switches off.
    """

    __slots__ = (
        "children",
        "detached",
        "digests",
        "key",
        "n_computed",
        "n_leases",
        "namespace",
        "pages",
        "parent",
        "serial",
        "tick",
    )

    def __init__(
        self,
        namespace: Namespace,
        parent: Node | None,
        key: bytearray,
        pages: list[int],
        *,
        tick: int,
        serial: int,
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.key = key
        """The run's tokens, little-endian int32."""
        self.pages = pages
        self.children: Children | None = None
        """None without children, and in every detached node."""
        self.n_leases = 0
        """Open leases whose path holds this node."""
        self.tick = tick
        """When the run was used last; never less than a child's."""
        self.serial = serial
        self.n_computed = 0
        """How many of its pages, from its start, a finite row has covered."""
        self.detached = False
        self.digests: array[int] | None = None
        """Chained digests of its leading pages, as far as they were asked for; a root holds its namespace's."""

    def unlink(self) -> None:
        """Lets go of everything it refers to. O(1)."""
        self.parent = None
        self.children = None
        self.digests = None
        self.key = bytearray()
        self.pages = []


class Lease:
    """A pin on a path from a root to ``node``'s end; none of its pages is evicted until it is released.

    Only the tree changes it.
    """

    __slots__ = ("n_tokens", "namespace", "node", "released")

    def __init__(self, node: Node, n_tokens: int) -> None:
        self.namespace = node.namespace
        self.node = node
        """The last node of the path; the lease ends at its end, also after a split."""
        self.n_tokens = n_tokens
        """Length of the path in tokens, a multiple of the page size."""
        self.released = False

    @property
    def detached(self) -> bool:
        """Whether the path's end cannot be matched any more."""
        return self.node.detached


def walk(node: Node, tokens: bytes, width: int) -> tuple[list[Node], int, Node | None, int]:
    """Follows ``tokens`` down from ``node``'s end, comparing whole edges; ``width`` is a page's bytes.

    Returns the nodes that match whole, in order; the number of bytes they take; and the node, if there is one,
    of which only the first pages match, with their number (at least 1). O(edges) and one compare of the bytes.
    """
    path: list[Node] = []
    start = 0
    children = node.children
    while children is not None:
        child = children.get(tokens[start : start + width])
        if child is None:
            break
        key = child.key
        if not tokens.startswith(key, start):
            return path, start, child, _common_pages(key, tokens, start, width)
        path.append(child)
        start += len(key)
        children = child.children
    return path, start, None, 0


def n_matching(node: Node, tokens: bytes, width: int) -> int:
    """How many bytes ``walk`` goes; it is asked of every prompt that waits, and so written out."""
    start = 0
    children = node.children
    while children is not None and (child := children.get(tokens[start : start + width])) is not None:
        key = child.key
        if not tokens.startswith(key, start):
            return start + width * _common_pages(key, tokens, start, width)
        start += len(key)
        children = child.children
    return start


def _common_pages(key: bytearray, tokens: bytes, start: int, width: int) -> int:
    """How many leading pages ``key`` has in common with ``tokens[start:]``, the first of which is known to be.

    Halves the rest at each compare, so that fewer bytes than the key has are copied and compared.
    """
    same = 1
    limit = min(len(key), len(tokens) - start) // width
    while same < limit:
        middle = (same + limit + 1) // 2
        if tokens.startswith(key[same * width : middle * width], start + same * width):
            same = middle
        else:
            limit = middle - 1
    return same
