"""Building blocks of the radix tree: nodes, namespaces, leases, retentions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.errors import InvariantError
from radixkv.tree.children import Children

TOKEN_BYTES = 4
"""Bytes of a token: one little-endian int32."""


class Namespace(NamedTuple):
    """Isolation key of the cache: requests share pages only within one namespace.

    Each field has its own position, so a salt never equals an adapter of the same name.
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    """Digest of the adapter with which the pages are computed; empty: without one."""
    epoch: int = 0
    """Version of the weights: always 0, because nothing changes the weights of a running server."""

    @property
    def group(self) -> str:
        """Name under which the pages are counted apart, if any are: the tenant's."""
        return self.tenant

    def differs_in_adapter(self, other: Namespace) -> bool:
        """Returns whether another namespace is of another adapter, and equal otherwise."""
        return self.adapter != other.adapter and self._replace(adapter=other.adapter) == other

    @property
    def is_private(self) -> bool:
        """Whether clients need a salt or a tenant's key to share it."""
        return bool(self.salt or self.tenant)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of consecutive pages that continues its parent's run; a root has no pages.

    ``unlink`` breaks a node's references when it leaves the tree, so nodes never wait for the cyclic garbage
    collector, which the runtime switches off.
    """

    namespace: Namespace
    parent: Node | None
    """None in a root."""
    key: bytes | bytearray
    """The run's tokens, little-endian int32; ``len(pages)`` whole pages of them.

    A bytearray for several pages. The tokens of a single page are often the same object as its key among the
    parent's children, which saves a sixth of the memory of such a node.
    """
    pages: list[int]
    """Page indices of the run, in token order."""
    rank: int = field(kw_only=True)
    """Order of eviction, which the eviction policy gives: small ranks go first, negative ones are demoted."""
    serial: int = field(kw_only=True)
    """Order of creation; breaks ties between equal ranks."""
    children: Children[Node] | None = None
    """None in a leaf and in every detached node."""
    n_leases: int = 0
    """Reference count: open leases whose path contains this node."""
    n_retentions: int = 0
    """Retentions whose path contains this node; if there is one, the node is evicted after all others."""
    retentions: set[Retention] | None = None
    """The retentions that end at this node; None if there are none."""
    n_hits: int = 0
    """Requests that have found the pages, as far as the eviction policy counts them; the same for all pages."""
    n_computed: int = 0
    """Leading pages whose KV is computed: a finished row with finite values has covered them."""
    detached: bool = False
    """Whether the node is out of the tree, so that no match finds it, while a lease still holds its pages."""
    digests: array[int] | None = None
    """Chained digests of the leading pages, computed on demand; in a root, the digest of its namespace."""
    state: State | None = None
    """That of the model's other layers after the last token; None without one, and in every detached node."""

    def unlink(self) -> None:
        """Drops every reference to other nodes, tokens and pages. O(1)."""
        self.parent = None
        self.children = None
        self.retentions = None
        self.digests = None
        self.key = b""
        self.pages = []


@dataclass(slots=True, eq=False)
class State:
    """What layers other than those with full attention need at a position. Read-only outside the tree.

    It is a state of recurrent layers, or a *window tail*: the pages of the window before it."""

    slot: int
    """Where the device has it."""
    n_tokens: int
    """Its position: it is that after so many tokens."""
    node: Node | None
    """The node at whose end it is; None once it has left the tree, and its slot may be another's."""
    is_turn: bool = False
    """Whether it is likely to be gone on from once only: by the next turn of its chat."""
    is_computed: bool = False
    """Whether a finished row with finite values has computed it."""
    n_holds: int = 0
    """Copies that read its slot, and requests that will: it is not evicted meanwhile."""
    pages: tuple[int, ...] = ()
    """Of a window tail: its window pages, in token order."""
    answer_end: int = 0
    """Of a turn: where the newest answer behind it ends, rounded down to a position of a state; 0: none has."""


class Lease:
    """A hold on the path from a root to the end of ``node``; no page of the path is evicted until the release.

    Read-only outside the tree.
    """

    __slots__ = ("branch", "is_hit", "is_use", "n_tokens", "namespace", "node", "released")

    def __init__(self, node: Node, n_tokens: int, *, is_use: bool = True, is_hit: bool = True) -> None:
        self.namespace = node.namespace
        self.node = node
        """The last node of the path. The lease covers all of it; a split keeps this true."""
        self.n_tokens = n_tokens
        """Length of the path in tokens, a multiple of the page size."""
        self.is_use = is_use
        """Whether the lease counts as a use of its path, at its release."""
        self.is_hit = is_hit
        """Whether the lease counts as a hit of the pages that it finds."""
        self.branch: Node | None = None
        """Where the path branches off from those of other leases, see ``SharedRuns``; None if that is not known."""
        self.released = False

    @property
    def detached(self) -> bool:
        """Whether the end of the path is detached, so that no match reaches it."""
        return self.node.detached


def require_open(lease: Lease) -> None:
    """Raises ``InvariantError`` if the lease was released."""
    if lease.released:
        raise InvariantError(f"a lease of {lease.n_tokens} tokens is used after its release")


class PartialPage(NamedTuple):
    """A cached page of which a request can use the first tokens only."""

    lease: Lease
    """Holds the page until it is copied; ends with it."""
    page: int
    """Index of the page."""
    n_tokens: int
    """Leading tokens of the page that the request has, too."""


class Retention:
    """A cached prefix that is evicted after everything else, from a root to the end of ``node``.

    Read-only outside the tree.
    """

    __slots__ = ("node", "until")

    def __init__(self, node: Node | None, until: float) -> None:
        self.node = node
        """The last node of the path, or of what is left of it; None once nothing is left."""
        self.until = until
        """When it is to end, in the clock of whoever added it."""


def first_without_branch(node: Node) -> Node:
    """Returns the highest node from which the path to ``node`` has no branch. O(edges)."""
    parent = node.parent
    while parent is not None and parent.parent is not None and parent.children is not None:
        if len(parent.children) > 1:
            break
        node, parent = parent, parent.parent
    return node


def uncomputed_nodes(end: Node) -> Iterator[Node]:
    """Yields the nodes of a path that have a page that is not computed, from its end upwards. O(edges)."""
    node = end
    while node.parent is not None and node.n_computed < len(node.pages):
        yield node
        node = node.parent


def detached_nodes(leases: Iterable[Lease]) -> Iterator[Node]:
    """Yields each detached node that one of the leases holds. O(edges)."""
    seen: set[Node] = set()
    for lease in leases:
        for node in upwards(lease.node):
            if not node.detached or node in seen:
                break
            seen.add(node)
            yield node


def upwards(end: Node | None) -> Iterator[Node]:
    """Yields a node and those above it up to the root, each of which may be unlinked then. None: nothing."""
    while end is not None:
        node, end = end, end.parent
        yield node


def path_to(end: Node | None) -> list[Node]:
    """Returns the nodes from the root to a node. O(edges)."""
    return list(upwards(end))[::-1]


def pages_of(nodes: Sequence[Node]) -> list[int]:
    """Returns the pages of consecutive nodes. O(pages)."""
    pages: list[int] = []
    for node in nodes:
        pages += node.pages
    return pages


def walk(node: Node, tokens: bytes, page_bytes: int) -> tuple[list[Node], int, Node | None, int]:
    """Follows ``tokens`` down from the end of ``node``. O(edges), and one comparison of the bytes.

    Args:
        node: where the walk starts.
        tokens: the tokens after the end of ``node``.
        page_bytes: bytes of one page's tokens.

    Returns:
        The nodes that match as a whole, in order; the bytes that they match; the node of which only leading pages
        match, or None; the number of those pages (at least 1, or 0 without such a node).
    """
    path: list[Node] = []
    start = 0
    children = node.children
    while children is not None:
        child = children.get(tokens[start : start + page_bytes])
        if child is None:
            break
        key = child.key
        if not tokens.startswith(key, start):
            return path, start, child, _common_pages(key, tokens, start, page_bytes)
        path.append(child)
        start += len(key)
        children = child.children
    return path, start, None, 0


def n_matching_bytes(node: Node, tokens: bytes, page_bytes: int) -> int:
    """Returns the number of bytes that ``walk`` matches.

    Repeats the loop of ``walk`` for speed: it runs for every waiting prompt.
    """
    start = 0
    children = node.children
    while children is not None and (child := children.get(tokens[start : start + page_bytes])) is not None:
        key = child.key
        if not tokens.startswith(key, start):
            return start + page_bytes * _common_pages(key, tokens, start, page_bytes)
        start += len(key)
        children = child.children
    return start


def _common_pages(key: bytes | bytearray, tokens: bytes, start: int, page_bytes: int) -> int:
    """Returns how many leading pages ``key`` and ``tokens[start:]`` have in common; the first page must match.

    Binary search: each comparison halves the rest, so fewer bytes are copied and compared than ``key`` has.
    """
    n_common = 1
    limit = min(len(key), len(tokens) - start) // page_bytes
    while n_common < limit:
        middle = (n_common + limit + 1) // 2
        if tokens.startswith(key[n_common * page_bytes : middle * page_bytes], start + n_common * page_bytes):
            n_common = middle
        else:
            limit = middle - 1
    return n_common
