"""Retentions: cached prefixes that are evicted after everything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from radixkv.tree.forest import Forest
from radixkv.tree.node import Namespace, Node, Retention


class RetainedPath(NamedTuple):
    """How much of a sequence is cached, and how much of that is retained."""

    n_cached: int
    """Pages of the longest cached prefix."""
    n_retained: int
    """Leading pages of it that a retention covers."""


class Retentions:
    """The retained prefixes of a tree. Retained pages are evicted only if no other page can be.

    A retention covers what is cached when it is added. Pages that are evicted or detached leave it, and pages that
    are committed later do not join it.

    Args:
        forest: the nodes of the tree.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    @property
    def n_pages(self) -> int:
        """Pages that a retention covers. O(1)."""
        return self._forest.n_retained

    def n_pages_of(self, namespace: Namespace) -> int:
        """Returns how many pages of a namespace a retention covers. O(1)."""
        return self._forest.retained_pages.get(namespace, 0)

    def find(self, namespace: Namespace, tokens: bytes) -> RetainedPath:
        """Returns what is cached and retained of the tokens. Changes nothing. O(edges)."""
        path, end, partial, n_partial = self._forest.walk(namespace, tokens)
        n_retained = sum(len(node.pages) for node in path if node.n_retentions)
        if partial is not None and partial.n_retentions:
            n_retained += n_partial
        return RetainedPath(end // self._forest.page_bytes + n_partial, n_retained)

    def ending(self, namespace: Namespace, tokens: bytes) -> list[Retention]:
        """Returns the retentions that end on the cached path of the tokens, so that one of the path covers them.

        O(edges + retentions returned).
        """
        path, _, _, _ = self._forest.walk(namespace, tokens)
        return [retention for node in path for retention in node.retentions or ()]

    def until(self, namespace: Namespace, tokens: bytes) -> float:
        """Returns until when all of the retained prefix of the tokens is retained; 0 if nothing is.

        O(edges + retained nodes below the prefix and their children).
        """
        path, _, partial, _ = self._forest.walk(namespace, tokens)
        retained = [node for node in (*path, partial) if node is not None and node.n_retentions]
        return max(one.until for one in _covering(retained[-1])) if retained else 0.0

    def add(self, namespace: Namespace, tokens: bytes, until: float) -> Retention:
        """Retains the longest cached prefix of the tokens, in whole pages. It may be empty.

        Splits at most one node. O(edges · log leaves + pages of the split node).

        Args:
            namespace: namespace of the tokens.
            tokens: the sequence.
            until: when the retention is to end, in the caller's clock. The caller removes it then.
        """
        path = self._forest.cut_out(namespace, tokens)
        if not path:
            return Retention(None, until)
        for node in path:
            self._forest.retain(node)
        end = path[-1]
        retention = Retention(end, until)
        if end.retentions is None:
            end.retentions = set()
        end.retentions.add(retention)
        return retention

    def remove(self, retention: Retention) -> None:
        """Ends a retention; its pages return to their place in the order of eviction. O(edges · log leaves)."""
        node = retention.node
        if node is not None and node.retentions is not None:
            node.retentions.remove(retention)
            node.retentions = node.retentions or None
        while node is not None and node.parent is not None:
            self._forest.end_retention(node)
            node = node.parent
        retention.node = None


def _covering(node: Node) -> Iterator[Retention]:
    """Yields the retentions that cover a node: those that end at it or below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        ending = node.retentions or ()
        yield from ending
        if node.children is not None and node.n_retentions > len(ending):
            stack.extend(child for child in node.children.values() if child.n_retentions)
