"""The trees of two tiers seen as one, whose runs say which of the tiers has their pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node


class _Place(NamedTuple):
    """Where a joint run begins in one of the trees."""

    node: Node
    start: int
    """Pages of the node before it."""


class _Following(NamedTuple):
    """What continues a joint run in a tree, by first page: the children of its node, or the rest of it."""

    nodes: Mapping[bytes, Node]
    start: int = 0
    """Pages of these nodes before their places."""

    def at(self, page: bytes) -> _Place | None:
        node = self.nodes.get(page)
        return None if node is None else _Place(node, self.start)


class JointRun:
    """Consecutive pages that are in the same of two trees: in both, or in one. A root has none.

    It is a part of a node of each tree that has it, and ends where either node ends or their tokens differ.

    Args:
        upper: where it begins in the upper tier's tree; None: it is not there.
        lower: where it begins in the lower tier's.
        page_bytes: bytes of one page's tokens.
    """

    __slots__ = ("_page_bytes", "_places", "pages")

    def __init__(self, upper: _Place | None, lower: _Place | None, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._places = upper, lower
        n_pages = min(len(place.node.pages) - place.start for place in self._places if place is not None)
        if upper is not None and lower is not None and n_pages:
            first, second = (
                bytes(node.key[start * page_bytes : (start + n_pages) * page_bytes])
                for node, start in (upper, lower)
            )
            if first != second:
                n_pages = n_common_tokens(first, second) * TOKEN_BYTES // page_bytes
        self.pages = range(n_pages)
        """As many elements as the run has pages."""

    @property
    def upper(self) -> Node | None:
        """The upper tier's node that has the pages."""
        return None if self._places[0] is None else self._places[0].node

    @property
    def lower(self) -> Node | None:
        """The lower tier's node that has the pages."""
        return None if self._places[1] is None else self._places[1].node

    @property
    def nodes(self) -> list[Node]:
        """The nodes that have the pages, one or two."""
        return [place.node for place in self._places if place is not None]

    @property
    def serial(self) -> int:
        """A number of its own, which it keeps while the nodes stay as they are."""
        tier, (node, start) = self._first_place
        return (node.serial << 20 | start) << 1 | tier

    @property
    def key(self) -> bytes:
        """The tokens of its pages."""
        _, (node, start) = self._first_place
        return bytes(node.key[start * self._page_bytes : (start + len(self.pages)) * self._page_bytes])

    @property
    def children(self) -> JointChildren | None:
        """The runs that continue it; None if there are none."""
        upper, lower = map(self._following, self._places)
        return JointChildren(upper, lower, self._page_bytes) if upper.nodes or lower.nodes else None

    @property
    def _first_place(self) -> tuple[int, _Place]:
        return next((tier, place) for tier, place in enumerate(self._places) if place is not None)

    def _following(self, place: _Place | None) -> _Following:
        if place is None:
            return _Following({})
        node, end = place.node, place.start + len(self.pages)
        if end == len(node.pages):
            return _Following(node.children or {})
        return _Following({bytes(node.key[end * self._page_bytes : (end + 1) * self._page_bytes]): node}, end)


@dataclass(frozen=True, slots=True)
class JointChildren:
    """The runs that continue a joint run, or a namespace's roots: each once, whichever trees have it.

    Args:
        upper: what continues it in the upper tier's tree.
        lower: the same in the lower tier's tree.
        page_bytes: bytes of one page's tokens.
    """

    upper: _Following
    lower: _Following
    page_bytes: int

    def __len__(self) -> int:
        """Returns the number of runs, or with many of them at least so many."""
        return max(len(self.upper.nodes), len(self.lower.nodes))

    def values(self) -> Iterator[JointRun]:
        """Yields the runs: first those that the upper tier has."""
        only_lower = (page for page in self.lower.nodes if page not in self.upper.nodes)
        for page in chain(self.upper.nodes, only_lower):
            yield JointRun(self.upper.at(page), self.lower.at(page), self.page_bytes)


def joint_roots(
    upper: Mapping[Namespace, Node], lower: Mapping[Namespace, Node], page_bytes: int
) -> Iterator[JointRun]:
    """Yields the root of each namespace of two trees."""
    for namespace in (*upper, *(one for one in lower if one not in upper)):
        places = [_Place(roots[namespace], 0) if namespace in roots else None for roots in (upper, lower)]
        yield JointRun(places[0], places[1], page_bytes)
