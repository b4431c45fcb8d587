"""Nodes of all namespaces with counts of their pages by state."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence

from radixkv.tree.changes import ChangeLog
from radixkv.tree.children import Children
from radixkv.tree.digest import namespace_digest
from radixkv.tree.evictable import EvictableLeaves
from radixkv.tree.node import Namespace, Node, Retention, State, upwards, walk

_DEMOTED = -1
"""Rank of demoted nodes."""


class Forest:
    """One tree of nodes for each namespace. Knows leases only as a reference count of each node.

    Every page is in one of three states: leased, evictable, or detached. All pages of a reachable node without a
    lease are computed and can be evicted, leaves first. A detached node has a lease, and is dropped with the last.

    Args:
        page_bytes: bytes of one page's tokens.
        groups: those whose evictable pages are counted apart.
    """

    def __init__(self, page_bytes: int, groups: Collection[str] = ()) -> None:
        self.page_bytes = page_bytes
        """Bytes of one page's tokens."""
        self.roots: dict[Namespace, Node] = {}
        self.evictable = EvictableLeaves(groups)
        """Leaves without a lease; contains no root."""
        self.n_leased = 0
        """Reachable pages that a lease holds."""
        self.n_evictable = 0
        """Reachable pages without a lease."""
        self.n_evictable_of = dict.fromkeys(groups, 0)
        """Evictable pages of each of ``groups``."""
        self.n_detached = 0
        """Unreachable pages that a lease holds."""
        self.n_retained = 0
        """Reachable pages that a retention covers."""
        self.retained_pages: dict[Namespace, int] = {}
        """Retained pages by namespace; namespaces without any are left out."""
        self.version = 0
        """Changes with every change that can alter the result of a match."""
        self.n_joins = 0
        """How often a node with one lease got a second one."""
        self.changes = ChangeLog(page_bytes)
        """Records changes of the computed pages, if it is on."""
        self.left_states: list[State] = []
        """States that have left the tree since ``NodeStates`` has freed the slots of others."""
        self._n_serials = 0

    def root(self, namespace: Namespace) -> Node:
        """Returns the root of a namespace; creates it if it is missing. O(1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self._node(namespace, None, b"", [], rank=0)
            root.digests = array("Q", (namespace_digest(namespace),))
            self.roots[namespace] = root
        return root

    def walk(self, namespace: Namespace, tokens: bytes) -> tuple[list[Node], int, Node | None, int]:
        """Follows the tokens of a namespace down from its root, as ``walk`` in ``tree.node``. Changes nothing."""
        root = self.roots.get(namespace)
        return ([], 0, None, 0) if root is None else walk(root, tokens, self.page_bytes)

    def cut_out(self, namespace: Namespace, tokens: bytes) -> list[Node]:
        """Returns the nodes of the cached prefix of the tokens, in order; splits the last one where it ends.

        O(edges · log leaves + pages of the split node).
        """
        path, _, partial, n_partial = self.walk(namespace, tokens)
        return path if partial is None else [*path, self.split(partial, n_partial)]

    def add_lease(self, node: Node) -> None:
        """Adds a lease to the reference count of a node. O(log leaves)."""
        if not node.n_leases and node.parent is not None:
            n_pages = len(node.pages)
            self._count_evictable(node, -n_pages)
            self.n_leased += n_pages
            if node.children is None:
                self.evictable.remove(node)
        node.n_leases += 1
        if node.n_leases == 2:
            self.n_joins += 1

    def remove_lease_of_path(self, end: Node) -> list[int]:
        """Removes a lease from the reference counts of the path to a node. O(edges + log leaves + pages freed).

        Returns the pages that this frees: ``remove_last_lease``.
        """
        freed: list[int] = []
        for node in upwards(end):
            if node.n_leases > 1:
                node.n_leases -= 1
            else:
                freed += self.remove_last_lease(node)
        return freed

    def remove_last_lease(self, node: Node) -> list[int]:
        """Removes the only lease from the reference count of a node. O(log leaves + pages freed).

        Nodes below it have lost that lease before.

        Returns:
            The pages that this frees. With the last lease go all pages of a detached node, and the pages whose KV
            is not computed: no request is left to compute it.
        """
        node.n_leases -= 1
        n_pages = len(node.pages)
        if node.detached:
            self.n_detached -= n_pages
            freed = node.pages
            node.unlink()
            return freed
        self.n_leased -= n_pages
        self._count_evictable(node, n_pages)
        if node.n_computed == n_pages:
            self._make_evictable(node)
            return []
        n_computed = node.n_computed
        _, freed = self.truncate(node, n_computed)
        if n_computed:
            self._make_evictable(node)
        return freed

    def mark_computed(self, node: Node, n_beyond: int) -> None:
        """Marks the path to the end of a node as computed, but for its last ``n_beyond`` pages.

        O(edges not computed before).
        """
        is_recorded = self.changes.is_on
        stored: list[tuple[Node, int]] = []
        while node.parent is not None and node.n_computed < len(node.pages):
            n_pages, n_before = len(node.pages), node.n_computed
            node.n_computed = n_pages if n_beyond <= 0 else max(n_before, n_pages - n_beyond)
            if is_recorded and node.n_computed > n_before and not node.detached:
                stored.append((node, n_before))
            n_beyond -= n_pages
            node = node.parent
        for node, n_before in reversed(stored):
            self.changes.add_stored(node, n_before, node.n_computed)

    def append(self, node: Node, tokens: bytes | bytearray, pages: Sequence[int], n_hits: int = 0) -> Node:
        """Adds pages with ``n_hits`` hits after the end of a leased node. O(new pages) amortised.

        No child of the node may start with the first of the new pages.

        Returns:
            The node that contains the new pages: ``node`` itself if it is a leaf but no root, is neither
            demoted nor retained, has no state, and has one lease and ``n_hits`` hits; else a new child with one
            lease.
        """
        self.version += 1
        self.n_leased += len(pages)
        if _grows(node, n_hits):
            if len(node.pages) == 1:
                node.key = bytearray(node.key)
            node.key += tokens
            node.pages += pages
            return node
        first_page = bytes(tokens[: self.page_bytes])
        key = first_page if len(pages) == 1 else bytearray(tokens)
        child = self._node(node.namespace, node, key, list(pages), rank=max(0, node.rank))
        child.n_leases = 1
        child.n_hits = n_hits
        if node.children is None:
            node.children = Children()
        node.children.add(first_page, child)
        return child

    def append_computed(self, node: Node, tokens: bytes | bytearray, page: int) -> bool:
        """Adds a computed page to a leaf of two or more pages, all computed, if ``append`` would not add a child.

        Returns whether it did; if not, nothing has changed. O(1) amortised.
        """
        n_pages = len(node.pages)
        # The key of a single page is not a bytearray: it may be its key among the parent's children.
        if node.n_computed < n_pages or n_pages == 1 or node.detached or not _grows(node, 0):
            return False
        self.version += 1
        self.n_leased += 1
        node.key += tokens
        node.pages.append(page)
        node.n_computed = n_pages + 1
        if self.changes.is_on:
            self.changes.add_stored(node, n_pages, n_pages + 1)
        return True

    def split(self, node: Node, n_pages: int) -> Node:
        """Moves the first ``n_pages`` of a node to a new parent, and returns that parent. O(pages of the node).

        ``node`` remains the lower part, so leases and retentions that end at it still do, and its state is there.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        boundary = n_pages * self.page_bytes
        upper = self._node(node.namespace, parent, node.key[:boundary], node.pages[:n_pages], rank=node.rank)
        upper.n_leases = node.n_leases
        upper.n_hits = node.n_hits
        upper.n_retentions = node.n_retentions
        upper.n_computed = min(node.n_computed, n_pages)
        parent.children[self._first_page(node)] = upper
        if node.digests is not None:
            upper.digests = node.digests[:n_pages]
            node.digests = node.digests[n_pages:]
        node.key = node.key[boundary:]
        node.pages = node.pages[n_pages:]
        node.n_computed -= upper.n_computed
        node.parent = upper
        upper.children = Children()
        upper.children.add(self._first_page(node), node)
        return upper

    def truncate(self, leaf: Node, n_kept: int) -> tuple[bytes, list[int]]:
        """Removes all but the first ``n_kept`` pages of an unleased leaf. O(pages removed + log leaves) amortised.

        Without any page left the leaf is removed; it must already be out of ``evictable`` then.

        Returns:
            The tokens of the removed pages, and the pages.
        """
        self.version += 1
        if self.changes.is_on:
            self.changes.add_removed(leaf, n_kept, leaf.n_computed)
        self._count_evictable(leaf, n_kept - len(leaf.pages))
        if leaf.state is not None and n_kept < len(leaf.pages):
            self.lose_state(leaf)
        if leaf.n_retentions:
            self._count_retained(leaf.namespace, n_kept - len(leaf.pages))
        if n_kept == 0:
            tokens, pages = bytes(leaf.key), leaf.pages
            self._remove(leaf)
            return tokens, pages
        boundary = n_kept * self.page_bytes
        tokens, pages = bytes(leaf.key[boundary:]), leaf.pages[n_kept:]
        assert isinstance(leaf.key, bytearray), "the key of more than one page"
        del leaf.key[boundary:]
        del leaf.pages[n_kept:]
        if leaf.digests is not None:
            del leaf.digests[n_kept:]
        leaf.n_computed = min(leaf.n_computed, n_kept)
        return tokens, pages

    def detach(self, top: Node) -> list[int]:
        """Makes a subtree unreachable. O(nodes · log leaves + pages freed).

        Leased nodes keep the link to their parent, so their leases still cover the same pages.

        Returns:
            The pages of the nodes without a lease, which are free now.
        """
        self.version += 1
        parent = top.parent
        if parent is None:
            del self.roots[top.namespace]
        else:
            self._drop_child(parent, top)
        freed: list[int] = []
        stack = [top]
        while stack:
            node = stack.pop()
            if node.children is not None:
                stack.extend(node.children.values())
            elif not node.n_leases and node.parent is not None:
                self.evictable.remove(node)
            node.children = None
            if self.changes.is_on:
                self.changes.add_removed(node, 0, node.n_computed)
            if node.state is not None:
                self.lose_state(node)
            if node.n_retentions:
                self._count_retained(node.namespace, -len(node.pages))
                node.n_retentions = 0
                if node.retentions is not None:
                    self._end_at(parent, node, node.retentions)
            if node.n_leases:
                node.detached = True
                self.n_leased -= len(node.pages)
                self.n_detached += len(node.pages)
            else:
                self._count_evictable(node, -len(node.pages))
                freed += node.pages
                node.unlink()
        return freed

    def lose_state(self, node: Node) -> None:
        """Takes the state of a node out of the tree. O(1)."""
        assert node.state is not None, "only a node with a state can lose it"
        self.left_states.append(node.state)
        self.changes.add_lost(node.state)
        node.state.node = None
        node.state = None

    def demote(self, node: Node) -> None:
        """Ranks a node before all others that are not demoted. O(log leaves)."""
        is_evictable = node.children is None and not node.n_leases
        if is_evictable:
            self.evictable.remove(node)
        node.rank = _DEMOTED
        if is_evictable:
            self.evictable.add(node)

    def retain(self, node: Node) -> None:
        """Counts a retention whose path contains the node. O(log leaves)."""
        self._set_retentions(node, node.n_retentions + 1)

    def end_retention(self, node: Node) -> None:
        """Counts a retention less whose path contains the node. O(log leaves)."""
        self._set_retentions(node, node.n_retentions - 1)

    def reachable(self) -> Iterator[Node]:
        """Yields every node that a match can reach, parents first, roots included."""
        for root in self.roots.values():
            yield from self.below(root)

    def below(self, top: Node) -> Iterator[Node]:
        """Yields a reachable node and every node below it, parents first."""
        stack = [top]
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack.extend(node.children.values())

    def _node(
        self, namespace: Namespace, parent: Node | None, key: bytes | bytearray, pages: list[int], *, rank: int
    ) -> Node:
        self._n_serials += 1
        return Node(namespace, parent, key, pages, rank=rank, serial=self._n_serials)

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.key[: self.page_bytes])

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        if leaf.retentions is not None:
            self._end_at(parent, leaf, leaf.retentions)
        self._drop_child(parent, leaf)
        leaf.unlink()

    def _drop_child(self, parent: Node, child: Node) -> None:
        assert parent.children is not None
        parent.children.remove(self._first_page(child))
        if not parent.children:
            parent.children = None
            if not parent.n_leases:
                self._make_evictable(parent)

    def _set_retentions(self, node: Node, n_retentions: int) -> None:
        is_changed = bool(n_retentions) != bool(node.n_retentions)
        is_evictable = is_changed and node.children is None and not node.n_leases
        if is_evictable:
            self.evictable.remove(node)
        node.n_retentions = n_retentions
        if is_changed:
            self._count_retained(node.namespace, len(node.pages) if n_retentions else -len(node.pages))
        if is_evictable:
            self.evictable.add(node)

    def _count_evictable(self, node: Node, n_pages: int) -> None:
        self.n_evictable += n_pages
        if self.n_evictable_of and node.namespace.group in self.n_evictable_of:
            self.n_evictable_of[node.namespace.group] += n_pages

    def _count_retained(self, namespace: Namespace, n_pages: int) -> None:
        self.n_retained += n_pages
        n_of_namespace = self.retained_pages.pop(namespace, 0) + n_pages
        if n_of_namespace:
            self.retained_pages[namespace] = n_of_namespace

    @staticmethod
    def _end_at(parent: Node | None, node: Node, moved: set[Retention]) -> None:
        """Makes the retentions that end at a node that leaves the tree end at its parent, or nowhere at a root.

        O(retentions that end at the node), however many end at the parent.
        """
        node.retentions = None
        is_root = parent is None or parent.parent is None
        for retention in moved:
            retention.node = None if is_root else parent
        if parent is not None and not is_root:
            if parent.retentions is None:
                parent.retentions = moved
            else:
                parent.retentions |= moved

    def _make_evictable(self, node: Node) -> None:
        """Makes a node without a lease evictable if it is a leaf; deletes it if it is an empty root."""
        if node.children is not None:
            return
        if node.parent is None:
            del self.roots[node.namespace]
        else:
            self.evictable.add(node)


def _grows(node: Node, n_hits: int) -> bool:
    """Whether new pages with ``n_hits`` hits are added to a leased node itself, and not to a new child."""
    return (
        node.n_leases == 1
        and node.children is None
        and node.n_hits == n_hits
        and node.rank >= 0
        and not node.n_retentions
        and node.state is None
        and node.parent is not None
    )
