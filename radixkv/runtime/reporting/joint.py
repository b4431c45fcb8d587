"""The trees of two tiers seen as one, whose runs say which of the tiers has their pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node


class _Place(NamedTuple):
    """Where a joint run begins in one of the trees."""

    node: Node
    start: int
    """Pages of the node before it."""


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
        tier = 0 if self._places[0] is not None else 1
        place = self._places[tier]
        assert place is not None
        return (place.node.serial << 20 | place.start) << 1 | tier

    @property
    def key(self) -> bytes:
        """The tokens of its pages."""
        place = self._places[0] or self._places[1]
        assert place is not None
        start = place.start * self._page_bytes
        return bytes(place.node.key[start : start + len(self.pages) * self._page_bytes])

    @property
    def children(self) -> JointChildren | None:
        """The runs that continue it; None if there are none."""
        upper, lower = (self._following(place) for place in self._places)
        return JointChildren(upper, lower, self._page_bytes) if upper or lower else None

    def _following(self, place: _Place | None) -> Mapping[bytes, Node] | _Place | None:
        if place is None:
            return None
        end = place.start + len(self.pages)
        return _Place(place.node, end) if end < len(place.node.pages) else place.node.children


class JointChildren:
    """The runs that continue a joint run, or a namespace's roots: each once, whichever trees have it.

    Args:
        upper: what continues it in the upper tier's tree: the rest of a node, or its children.
        lower: the same in the lower tier's tree.
        page_bytes: bytes of one page's tokens.
    """

    __slots__ = ("_lower", "_page_bytes", "_upper")

    def __init__(
        self,
        upper: Mapping[bytes, Node] | _Place | None,
        lower: Mapping[bytes, Node] | _Place | None,
        page_bytes: int,
    ) -> None:
        self._upper = upper
        self._lower = lower
        self._page_bytes = page_bytes

    def __len__(self) -> int:
        """Returns the number of runs, or with many of them at least so many."""
        return max(1 if isinstance(side, _Place) else len(side or ()) for side in (self._upper, self._lower))

    def values(self) -> Iterator[JointRun]:
        """Yields the runs: first those that the upper tier has."""
        for page in self._pages(self._upper):
            yield JointRun(self._at(self._upper, page), self._at(self._lower, page), self._page_bytes)
        for page in self._pages(self._lower):
            if self._at(self._upper, page) is None:
                yield JointRun(None, self._at(self._lower, page), self._page_bytes)

    def _pages(self, side: Mapping[bytes, Node] | _Place | None) -> Iterable[bytes]:
        return [self._first_page(side)] if isinstance(side, _Place) else side or ()

    def _at(self, side: Mapping[bytes, Node] | _Place | None, page: bytes) -> _Place | None:
        if isinstance(side, _Place):
            return side if self._first_page(side) == page else None
        child = None if side is None else side.get(page)
        return None if child is None else _Place(child, 0)

    def _first_page(self, place: _Place) -> bytes:
        start = place.start * self._page_bytes
        return bytes(place.node.key[start : start + self._page_bytes])


def joint_roots(
    upper: Mapping[Namespace, Node], lower: Mapping[Namespace, Node], page_bytes: int
) -> Iterator[JointRun]:
    """Yields the root of each namespace of two trees."""
    for namespace in (*upper, *(one for one in lower if one not in upper)):
        places = [_Place(roots[namespace], 0) if namespace in roots else None for roots in (upper, lower)]
        yield JointRun(places[0], places[1], page_bytes)
