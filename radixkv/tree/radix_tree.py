"""The radix tree: which tokens' pages are cached, who holds them, and which may go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from radixkv.errors import InvariantError
from radixkv.tree.digest import Digest, RecentDigests, chained_xxh3_64, digest_at
from radixkv.tree.explain import Explanation, explain_match
from radixkv.tree.forest import Forest
from radixkv.tree.invariants import check_counts, check_forest
from radixkv.tree.node import Lease, Namespace, Node, n_matching, walk
from radixkv.tree.shared_runs import SharedRun, find_shared_runs

_EVICTED_RUNS_REMEMBERED = 1 << 14


class EvictedRun(NamedTuple):
    """Consecutive pages that were evicted together."""

    namespace: Namespace
    parent_digest: int
    """Chained digest of all that comes before them."""
    tokens: bytes
    pages: list[int]


class RadixTree:
    """Cached pages of all namespaces, found by their tokens (little-endian int32).

    Two sequences share a page only if their tokens were compared. Methods that take a lease raise
    ``InvariantError`` if it was released. No method recurses, and none leaves work to the cyclic collector.
    """

    def __init__(
        self, page_size: int, *, digest: Digest = chained_xxh3_64, clock: Callable[[], int] | None = None
    ) -> None:
        """An empty tree.

        Args:
            page_size: in tokens.
            digest: names evicted runs; what is shared does not depend on it.
            clock: asked at each ``lease`` and ``release`` for the path's tick. ``evict`` takes the least tick
                first: None counts upwards, so that this is what was used least recently; another clock gives
                another order. Whenever ``evict`` or ``check`` is called, no run may have less than those below it.
        """
        self._page_size = page_size
        self._width = 4 * page_size
        self._digest = digest
        self._forest = Forest(self._width, digest, clock)
        self._leases: set[Lease] = set()
        self._evicted = RecentDigests(_EVICTED_RUNS_REMEMBERED)

    @property
    def n_pages_reachable(self) -> int:
        """Pages that a match can meet: the leased and the evictable ones."""
        return self._forest.n_leased + self._forest.n_evictable

    @property
    def n_pages_evictable(self) -> int:
        """Reachable pages without a lease; ``evict`` can free them all."""
        return self._forest.n_evictable

    @property
    def n_pages_leased(self) -> int:
        """Reachable pages that a lease holds."""
        return self._forest.n_leased

    @property
    def n_pages_detached(self) -> int:
        """Unreachable pages that a lease holds."""
        return self._forest.n_detached

    @property
    def version(self) -> int:
        """Changes whenever the result of a match could."""
        return self._forest.version

    def namespaces(self) -> list[Namespace]:
        """Those with a page or a lease. O(namespaces)."""
        return list(self._forest.roots)

    def match(self, namespace: Namespace, tokens: bytes) -> int:
        """How many of the tokens are cached, in whole pages. Reads only. O(edges)."""
        root = self._forest.roots.get(namespace)
        return 0 if root is None else n_matching(root, tokens, self._width) // 4

    def lease(self, namespace: Namespace, tokens: bytes) -> Lease:
        """Pins the longest cached prefix of the tokens in whole pages, if only the empty one, and touches it.

        Splits at most one node. O(edges), and O(pages of the split node).
        """
        root = self._forest.root(namespace)
        lease = Lease(root, 0)
        self._forest.pin(root)
        tick = root.tick = self._forest.tick()
        for node in self._advance(lease, tokens):
            node.tick = tick
        self._leases.add(lease)
        return lease

    def pages(self, lease: Lease) -> list[int]:
        """All pages of the lease's path, in order. O(pages)."""
        self._require_open(lease)
        path: list[Node] = []
        node: Node | None = lease.node
        while node is not None:
            path.append(node)
            node = node.parent
        return _pages(reversed(path))

    def extend(self, lease: Lease, tokens: bytes) -> list[int]:
        """Moves the lease over what others committed since; ``tokens`` are those that follow its end.

        Returns the pages it now covers in addition; none if it is detached. O(new edges + new pages).
        """
        self._require_open(lease)
        return _pages(self._advance(lease, tokens))

    def commit(self, lease: Lease, tokens: bytes | bytearray, pages: Sequence[int]) -> list[int]:
        """Takes the pages of the tokens that follow the lease's end; moves the lease behind them. A detached
        lease takes nothing, and stays where it is.

        Returns the tree's pages for the first of the given ones, as far as the tokens were cached already: those
        given are duplicates, to be freed once no table names them. Raises ``InvariantError`` if the tokens do not
        fill the pages. O(new pages) amortised.
        """
        if lease.released:
            self._require_open(lease)
        if len(tokens) != self._width * len(pages):
            raise InvariantError(
                f"{len(tokens)} bytes of tokens do not fill {len(pages)} pages of {self._width}; commit whole pages"
            )
        if lease.node.detached:
            return []
        canonical: list[int] = []
        children = lease.node.children
        if children is not None and bytes(tokens[: self._width]) in children:
            canonical = _pages(self._advance(lease, bytes(tokens)))
            tokens, pages = tokens[len(canonical) * self._width :], pages[len(canonical) :]
        if pages:
            lease.node = self._forest.append(lease.node, tokens, pages)
            lease.n_tokens += self._page_size * len(pages)
        return canonical

    def fork(self, lease: Lease) -> Lease:
        """A second pin on the same path. O(edges)."""
        self._require_open(lease)
        node: Node | None = lease.node
        while node is not None:
            node.n_leases += 1
            node = node.parent
        second = Lease(lease.node, lease.n_tokens)
        self._leases.add(second)
        return second

    def release(self, lease: Lease) -> list[int]:
        """Unpins the path and touches it; a second time raises ``InvariantError``.

        Returns the pages that no other lease holds and that are detached, or were never settled: those cannot
        be cached, for nobody is left to settle them. O(edges + log leaves).
        """
        if lease.released:
            self._require_open(lease)
        lease.released = True
        self._leases.remove(lease)
        tick = self._forest.tick()
        freed: list[int] = []
        node: Node | None = lease.node
        while node is not None:
            parent = node.parent
            node.tick = tick
            freed += self._forest.unpin(node)
            node = parent
        return freed

    def mark_computed(self, lease: Lease, n_tokens: int) -> None:
        """A finite row has covered the first ``n_tokens`` of the path: their whole pages can be trusted.

        O(edges not settled before).
        """
        if lease.released:
            self._require_open(lease)
        node, n_behind = lease.node, lease.n_tokens // self._page_size - n_tokens // self._page_size
        while node.parent is not None and node.n_computed < len(node.pages):
            n_pages = len(node.pages)
            node.n_computed = n_pages if n_behind <= 0 else max(node.n_computed, n_pages - n_behind)
            n_behind -= n_pages
            node = node.parent

    def first_uncomputed(self, lease: Lease) -> Node | None:
        """The first node of the path that is not settled whole. O(edges not settled)."""
        self._require_open(lease)
        top: Node | None = None
        node = lease.node
        while node.parent is not None and node.n_computed < len(node.pages):
            top, node = node, node.parent
        return top

    def leads_through(self, lease: Lease, nodes: AbstractSet[Node]) -> bool:
        """Whether the lease's path has one of the nodes. O(edges)."""
        self._require_open(lease)
        node: Node | None = lease.node
        while node is not None:
            if node in nodes:
                return True
            node = node.parent
        return False

    def detach_uncomputed(self, lease: Lease) -> list[int]:
        """Makes the path unreachable from its first unsettled page on, with all that lies below.

        Returns the pages freed at once. O(edges + subtree · log leaves).
        """
        top = self.first_uncomputed(lease)
        if top is None or top.detached:
            return []
        if top.n_computed:
            self._forest.split(top, top.n_computed)
        return self._forest.detach(top)

    def detach(self, namespace: Namespace, tokens: bytes = b"") -> list[int]:
        """Makes all pages behind the whole pages of ``tokens`` unreachable; without any, the whole namespace.

        Returns the pages freed at once; leased ones go with their last lease, and a commit on such a lease does
        nothing. O(edges + subtree · log leaves).
        """
        root = self._forest.roots.get(namespace)
        if root is None:
            return []
        n_pages = len(tokens) // self._width
        if not n_pages:
            return self._forest.detach(root)
        path, end, partial, n_partial = walk(root, tokens, self._width)
        if partial is not None:
            if end // self._width + n_partial < n_pages:
                return []
            self._forest.split(partial, n_partial)
            return self._forest.detach(partial)
        if end // self._width < n_pages or path[-1].children is None:
            return []
        freed: list[int] = []
        for child in list(path[-1].children.values()):
            freed += self._forest.detach(child)
        return freed

    def evict(self, n_pages: int) -> list[EvictedRun]:
        """Frees ``n_pages``, or all evictable ones if they are fewer: leaves of the least tick first, from a
        leaf's end. O(pages + log leaves) a run, and a digest of each page kept before it, once.
        """
        forest = self._forest
        runs: list[EvictedRun] = []
        while n_pages > 0 and forest.n_evictable:
            leaf: Node = forest.evictable[0]
            namespace = leaf.namespace
            n_kept = max(0, len(leaf.pages) - n_pages)
            parent_digest = digest_at(self._digest, leaf, n_kept, self._width)
            if not n_kept:
                forest.evictable.pop(0)
            tokens, pages = forest.cut(leaf, n_kept)
            n_pages -= len(pages)
            self._evicted.add(self._digest(parent_digest, tokens[: self._width]))
            runs.append(EvictedRun(namespace, parent_digest, tokens, pages))
        return runs

    def shared_runs(self, leases: Sequence[Lease | None]) -> list[SharedRun]:
        """Which of the leases hold the same run of pages, for attention to read it once; None holds nothing.

        What is found stays true while these leases are open. O(edges).
        """
        for lease in leases:
            if lease is not None and lease.released:
                self._require_open(lease)
        return find_shared_runs(leases)

    def explain(self, namespace: Namespace, tokens: bytes, *, contents: bool = True) -> Explanation:
        """Why a match ends where it does. O(edges + log children), and O(edges) for each other namespace.

        Without ``contents`` it tells nothing finer than pages, and other namespaces are not looked at.
        """
        return explain_match(
            self._forest.roots, namespace, tokens, self._width, self._digest, self._evicted, contents
        )

    def reachable_pages(self) -> Iterator[int]:
        """Every page that a match can meet. O(pages)."""
        for node in self._forest.reachable():
            yield from node.pages

    def detached_pages(self) -> Iterator[int]:
        """Every page that is unreachable and leased. O(edges of the leases + pages)."""
        seen: set[Node] = set()
        for lease in self._leases:
            node: Node | None = lease.node
            while node is not None and node.detached and node not in seen:
                seen.add(node)
                yield from node.pages
                node = node.parent

    def check(self, *, deep: bool = True) -> None:
        """Raises ``InvariantError`` if anything is inconsistent. O(pages + edges of the leases), and a sort of the
        evictable leaves; without ``deep`` only counts are looked at, O(1)."""
        if deep:
            check_forest(self._forest, self._leases, self._digest)
        else:
            check_counts(self._forest)

    def _advance(self, lease: Lease, tokens: bytes) -> list[Node]:
        """Moves the lease over the cached prefix of the tokens behind its end; returns the nodes it passed."""
        path, end, partial, n_pages = walk(lease.node, tokens, self._width)
        if partial is not None:
            path.append(self._forest.split(partial, n_pages))
            end += n_pages * self._width
        if path:
            for node in path:
                self._forest.pin(node)
            lease.node = path[-1]
            lease.n_tokens += end // 4
        return path

    @staticmethod
    def _require_open(lease: Lease) -> None:
        if lease.released:
            raise InvariantError(f"a lease over {lease.n_tokens} tokens is used after its release")


def _pages(nodes: Iterator[Node] | Sequence[Node]) -> list[int]:
    pages: list[int] = []
    for node in nodes:
        pages += node.pages
    return pages
