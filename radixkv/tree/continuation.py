"""How cached sequences go on after the tokens of a request."""

from __future__ import annotations

from itertools import islice

from radixkv.tree.children import Children
from radixkv.tree.node import Node

_MAX_CHILDREN = 32
"""Children among which the likeliest one is looked for, the newest ones: it limits the time."""


def continuation(end: Node, tail: bytes, n_bytes: int, page_bytes: int) -> bytes:
    """Returns up to ``n_bytes`` of the tokens that follow ``end`` and ``tail`` in computed pages; changes nothing.

    Where sequences branch, it follows the one that would be evicted last: under LRU the one that was used last.
    O(edges + bytes).

    Args:
        end: a reachable node, the last one of a path.
        tail: the tokens after that path.
        n_bytes: how many bytes to return at most.
        page_bytes: bytes of one page's tokens.
    """
    found = b""
    node = end
    while len(found) < n_bytes and (children := node.children) is not None:
        child = children.get(tail[:page_bytes]) if len(tail) >= page_bytes else _likeliest(children, tail)
        if child is None:
            break
        n_wanted = len(tail) + n_bytes - len(found)
        known = bytes(child.key[: min(child.n_computed * page_bytes, n_wanted)])
        n_common = min(len(tail), len(known))
        if known[:n_common] != tail[:n_common]:
            break
        found += known[n_common:]
        tail = tail[n_common:]
        node = child  # after a page that is not computed there is none that is
    return found


def _likeliest(children: Children[Node], start: bytes) -> Node | None:
    """Returns the child that would be evicted last, of the newest that are computed and begin with ``start``."""
    found = None
    for first_page in islice(reversed(children), _MAX_CHILDREN):
        if first_page.startswith(start):
            child = children[first_page]
            if child.n_computed and (found is None or child.rank > found.rank):
                found = child
    return found
