"""Demotions: cached sequences that are evicted before all that is not retained."""

from __future__ import annotations

from radixkv.tree.forest import Forest
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node
from radixkv.tree.states import NodeStates


class Demotions:
    """The demoted pages of a tree: those of sequences that nobody will use again.

    Until a demoted page is evicted it is found as before, and a use ends the demotion.

    Args:
        forest: the nodes of the tree.
        states: the tree's; None if it has none.
    """

    def __init__(self, forest: Forest, states: NodeStates | None = None) -> None:
        self._forest = forest
        self._states = states

    def add(self, namespace: Namespace, tokens: bytes, n_kept: int = 0) -> int:
        """Makes the cached prefix of the tokens, but for its first ``n_kept`` tokens, the next to be evicted.

        Pages of other sequences that continue the prefix keep their rank, and are evicted before it. Splits at most
        two nodes. O(edges · log leaves + pages of the split nodes), with states also O(children of these nodes).

        States are demoted, too, but for those at pages that other sequences continue.

        Args:
            namespace: namespace of the tokens.
            tokens: the sequence, in whole pages; a last page that they do not fill is left out.
            n_kept: length of the prefix that keeps its rank, a multiple of the page size.

        Returns:
            The number of pages that were not demoted before.
        """
        n_pages_kept, n_demoted = n_kept * TOKEN_BYTES // self._forest.page_bytes, 0
        path = self._forest.cut_out(namespace, tokens)
        for node in path:
            n_pages = len(node.pages)
            if 0 < n_pages_kept < n_pages:
                self._forest.split(node, n_pages_kept)
            if n_pages_kept < n_pages and node.rank >= 0:
                self._forest.demote(node)
                n_demoted += len(node.pages)
            n_pages_kept = max(0, n_pages_kept - n_pages)
        if self._states is not None:
            self._demote_states(self._states, path)
        return n_demoted

    @staticmethod
    def _demote_states(states: NodeStates, path: list[Node]) -> None:
        """Demotes the states of a path's end, up to a node that others use or continue; the last one goes first.

        Unlike pages, which leave a path from its end, each state can be evicted alone.
        """
        demoted: list[Node] = []
        for node in reversed(path):
            children = () if node.children is None else node.children.values()
            if node.rank >= 0 or node.n_leases or any(child.rank >= 0 for child in children):
                break
            demoted.append(node)
        for node in reversed(demoted):
            if node.state is not None:
                states.demote(node.state)

    @staticmethod
    def n_at_end(lease: Lease) -> int:
        """Returns how many pages at the end of the lease's path are demoted. O(edges)."""
        n_demoted, node = 0, lease.node
        while node.parent is not None and node.rank < 0:
            n_demoted += len(node.pages)
            node = node.parent
        return n_demoted

    def reach_end(self, namespace: Namespace, tokens: bytes) -> bool:
        """Returns whether the last page of the tokens' cached prefix is demoted. Changes nothing. O(edges)."""
        path, _, partial, _ = self._forest.walk(namespace, tokens)
        end = path[-1] if partial is None and path else partial
        return end is not None and end.rank < 0
