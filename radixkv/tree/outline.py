"""The outline of a tree: its largest nodes, found in a bounded walk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

_CHILDREN_PER_ROUND = 64
"""Children of a node that the walk takes before it goes on with those of other nodes."""


class Run(Protocol):
    """What the walk needs of a node: a ``Node`` of a tree, or a ``JointRun`` of two."""

    @property
    def pages(self) -> Sized:
        """Its pages."""

    @property
    def children(self) -> Any:
        """A container with ``len`` and ``values`` of the nodes that continue it; None if there are none."""


RunT = TypeVar("RunT", bound=Run)


class OutlinedNode(NamedTuple, Generic[RunT]):
    """A node of an outline."""

    node: RunT
    parent: int
    """Index of the parent in ``Outline.nodes``; -1 for a root."""
    n_pages: int
    """Pages of the node and of all visited nodes below it."""
    n_more: int
    """Nodes outside the outline whose nearest ancestor in it is this node; at least so many, if the walk did not
    visit all."""
    n_more_pages: int
    """Pages of those that were visited."""
    age: int | None
    """Uses of the tree since that of the node; None if it is demoted, or if ages do not count."""


class Outline(NamedTuple, Generic[RunT]):
    """The largest nodes of a tree, parents first."""

    nodes: list[OutlinedNode[RunT]]
    n_pages: int
    """Pages of all nodes that the walk visited."""
    n_more_roots: int
    """Visited roots that are not in the outline."""
    n_more_root_pages: int
    """Pages of those, with the nodes below them."""


def outline(
    roots: Iterable[RunT], age: Callable[[RunT], int | None], *, max_nodes: int, max_visited: int
) -> Outline[RunT]:
    """Finds the nodes with the most pages in and below them.

    Nodes near the roots are visited first, and the children of a node with many children in turn with those of
    others. So a tree with more than ``max_visited`` nodes lacks some that are far down, or of many siblings. In any
    other tree the result is exact. Of nodes with equally many pages, those visited first are taken.

    O(max_visited · log max_visited), whatever the size of the tree.

    Args:
        roots: the roots of the tree.
        age: gives the age of a node, as ``EvictionPolicy.age``.
        max_nodes: most nodes of the outline.
        max_visited: most nodes to look at.
    """
    nodes, parents, n_not_visited = _visit(roots, max_visited)
    n_pages = [len(node.pages) for node in nodes]
    for index in range(len(nodes) - 1, -1, -1):
        if (parent := parents[index]) >= 0:
            n_pages[parent] += n_pages[index]
    # A parent has at least the pages of a child and comes first, so it is among the largest if the child is.
    largest = sorted(range(len(nodes)), key=n_pages.__getitem__, reverse=True)[:max_nodes]
    places = {index: place for place, index in enumerate(sorted(largest))}
    n_more, n_more_pages = n_not_visited, [0] * len(nodes)
    n_more_roots = n_more_root_pages = 0
    for index in range(len(nodes) - 1, -1, -1):
        if index in places:
            continue
        if (parent := parents[index]) >= 0:
            n_more[parent] += n_more[index] + 1
            n_more_pages[parent] += n_more_pages[index] + len(nodes[index].pages)
        else:
            n_more_roots += 1
            n_more_root_pages += n_pages[index]
    outlined: list[OutlinedNode[RunT]] = []
    for index in places:
        node, parent = nodes[index], places.get(parents[index], -1)
        outlined.append(OutlinedNode(node, parent, n_pages[index], n_more[index], n_more_pages[index], age(node)))
    n_visited_pages = sum(n for n, parent in zip(n_pages, parents, strict=True) if parent < 0)
    return Outline(outlined, n_visited_pages, n_more_roots, n_more_root_pages)


def _visit(roots: Iterable[RunT], max_visited: int) -> tuple[Sequence[RunT], list[int], list[int]]:
    """Returns visited nodes, parents first, the index of each one's parent, and how many children were left out."""
    nodes: list[RunT] = []
    parents: list[int] = []
    n_not_visited: list[int] = []
    waiting: deque[tuple[int, Iterator[RunT]]] = deque([(-1, iter(roots))])
    while waiting and len(nodes) < max_visited:
        parent, siblings = waiting.popleft()
        n_before = len(nodes)
        for node in islice(siblings, min(_CHILDREN_PER_ROUND, max_visited - n_before)):
            children = node.children
            if children is not None:
                waiting.append((len(nodes), iter(children.values())))
            nodes.append(node)
            parents.append(parent)
            n_not_visited.append(0 if children is None else len(children))
        n_taken = len(nodes) - n_before
        if parent >= 0:
            n_not_visited[parent] = max(0, n_not_visited[parent] - n_taken)
        if n_taken == _CHILDREN_PER_ROUND:
            waiting.append((parent, siblings))
    return nodes, parents, n_not_visited
