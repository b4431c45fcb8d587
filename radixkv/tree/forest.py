"""The nodes of all namespaces, and where their pages are counted."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.tree.children import Children
from radixkv.tree.digest import Digest, namespace_digest
from radixkv.tree.node import Namespace, Node


class Forest:
    """A tree of nodes for each namespace; knows of leases only how many hold a node.

    A page is leased, evictable or detached. A node without a lease is settled, so that all its pages can be
    evicted, from the leaves up; a detached node has a lease, or it is gone.
    """

    def __init__(self, width: int, digest: Digest, clock: Callable[[], int] | None = None) -> None:
        self.width = width
        """Bytes of a page's tokens."""
        self.roots: dict[Namespace, Node] = {}
        self.evictable = SortedKeyList(key=attrgetter("tick", "serial"))
        """Leaves without a lease, least tick first; roots are never in it."""
        self.n_leased = 0
        self.n_evictable = 0
        self.n_detached = 0
        self.version = 0
        """Changes whenever a match could."""
        self._digest = digest
        self._clock = count(1).__next__ if clock is None else clock
        self._n_serials = 0

    def tick(self) -> int:
        """The logical clock's next value. O(1)."""
        return self._clock()

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made if it is missing. O(1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self._node(namespace, None, bytearray(), [], tick=0)
            root.digests = array("Q", (namespace_digest(self._digest, namespace),))
            self.roots[namespace] = root
        return root

    def pin(self, node: Node) -> None:
        """Counts one more lease on a node. O(log leaves)."""
        if not node.n_leases and node.parent is not None:
            n_pages = len(node.pages)
            self.n_evictable -= n_pages
            self.n_leased += n_pages
            if node.children is None:
                self.evictable.remove(node)
        node.n_leases += 1

    def unpin(self, node: Node) -> list[int]:
        """Counts one lease less on a node, and returns the pages that this frees. O(log leaves + pages freed).

        With its last lease go a detached node and pages that never settled: nobody is left to settle them.
        Unpin a path from its end up.
        """
        node.n_leases -= 1
        if node.n_leases:
            return []
        n_pages = len(node.pages)
        if node.detached:
            self.n_detached -= n_pages
            freed = node.pages
            node.unlink()
            return freed
        self.n_leased -= n_pages
        self.n_evictable += n_pages
        if node.n_computed == n_pages:
            self._offer(node)
            return []
        n_kept = node.n_computed
        _, freed = self.cut(node, n_kept)
        if n_kept:
            self._offer(node)
        return freed

    def append(self, node: Node, tokens: bytes | bytearray, pages: Sequence[int]) -> Node:
        """Adds pages behind the end of a leased node of which no child begins with the first of them.

        Returns the node that holds them: the same one if it is a leaf of one lease, else a new child that is
        leased once. O(new pages) amortised.
        """
        self.version += 1
        self.n_leased += len(pages)
        if node.children is None and node.n_leases == 1 and node.parent is not None:
            node.key += tokens
            node.pages += pages
            return node
        child = self._node(node.namespace, node, bytearray(tokens), list(pages), tick=node.tick)
        child.n_leases = 1
        if node.children is None:
            node.children = Children()
        node.children.add(bytes(tokens[: self.width]), child)
        return child

    def split(self, node: Node, n_pages: int) -> Node:
        """Gives a node's first ``n_pages`` to a new parent of it, which is returned. O(pages of the node).

        ``node`` keeps its end, and so stays the end of the leases that end there.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        cut = n_pages * self.width
        upper = self._node(node.namespace, parent, node.key[:cut], node.pages[:n_pages], tick=node.tick)
        upper.n_leases = node.n_leases
        upper.n_computed = min(node.n_computed, n_pages)
        parent.children[self._first_page(node)] = upper
        if node.digests is not None:
            upper.digests = node.digests[:n_pages]
            node.digests = node.digests[n_pages:]
        node.key = node.key[cut:]
        node.pages = node.pages[n_pages:]
        node.n_computed -= upper.n_computed
        node.parent = upper
        upper.children = Children()
        upper.children.add(self._first_page(node), node)
        return upper

    def cut(self, leaf: Node, n_kept: int) -> tuple[bytes, list[int]]:
        """Takes all pages but the first ``n_kept`` from an unleased leaf; returns their tokens and the pages.

        A leaf that keeps none goes, and must not be in ``evictable`` any more. O(pages cut + log leaves) amortised.
        """
        self.version += 1
        self.n_evictable -= len(leaf.pages) - n_kept
        if n_kept == 0:
            tokens, pages = bytes(leaf.key), leaf.pages
            self._remove(leaf)
            return tokens, pages
        at = n_kept * self.width
        tokens, pages = bytes(leaf.key[at:]), leaf.pages[n_kept:]
        del leaf.key[at:]
        del leaf.pages[n_kept:]
        if leaf.digests is not None:
            del leaf.digests[n_kept:]
        leaf.n_computed = min(leaf.n_computed, n_kept)
        return tokens, pages

    def detach(self, top: Node) -> list[int]:
        """Makes a node and all below it unreachable; returns the pages of those that have no lease.

        The others keep the link to their parents, so that their leases still have their pages.
        O(nodes · log leaves + pages freed).
        """
        self.version += 1
        parent = top.parent
        if parent is None:
            del self.roots[top.namespace]
        else:
            self._drop_child(parent, top)
        freed: list[int] = []
        waiting = [top]
        while waiting:
            node = waiting.pop()
            if node.children is not None:
                waiting.extend(node.children.values())
            elif not node.n_leases and node.parent is not None:
                self.evictable.remove(node)
            node.children = None
            if node.n_leases:
                node.detached = True
                self.n_leased -= len(node.pages)
                self.n_detached += len(node.pages)
            else:
                self.n_evictable -= len(node.pages)
                freed += node.pages
                node.unlink()
        return freed

    def reachable(self) -> Iterator[Node]:
        """Every node that a match can meet, roots included, parents first."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            if node.children is not None:
                waiting.extend(node.children.values())

    def _node(
        self, namespace: Namespace, parent: Node | None, key: bytearray, pages: list[int], *, tick: int
    ) -> Node:
        self._n_serials += 1
        return Node(namespace, parent, key, pages, tick=tick, serial=self._n_serials)

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.key[: self.width])

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self._drop_child(parent, leaf)
        leaf.unlink()

    def _drop_child(self, parent: Node, child: Node) -> None:
        assert parent.children is not None
        parent.children.remove(self._first_page(child))
        if not parent.children:
            parent.children = None
            if not parent.n_leases:
                self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Lets an unleased node be evicted if it is a leaf; a root that nobody needs goes at once."""
        if node.children is not None:
            return
        if node.parent is None:
            del self.roots[node.namespace]
        else:
            self.evictable.add(node)
