"""Radix tree of cached KV pages, with leases that hold paths and eviction of unused leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from time import monotonic

from radixkv.errors import InvariantError
from radixkv.tree.changes import ChangeLog, StoredPages
from radixkv.tree.continuation import continuation
from radixkv.tree.demotions import Demotions
from radixkv.tree.digest import chained_xxh3_64, digest_at
from radixkv.tree.evict import EvictedRun, evict_leaves
from radixkv.tree.eviction_policies import EvictionPolicy, LruEviction
from radixkv.tree.explain import Explanation, explain_match, explain_state
from radixkv.tree.forest import Forest
from radixkv.tree.history import PageHistory
from radixkv.tree.invariants import check_counts, check_forest
from radixkv.tree.marks import Marks
from radixkv.tree.neighbours import find_neighbours
from radixkv.tree.node import (
    TOKEN_BYTES,
    Lease,
    Namespace,
    Node,
    PartialPage,
    detached_nodes,
    first_without_branch,
    n_matching_bytes,
    pages_of,
    path_to,
    require_open,
    uncomputed_nodes,
    upwards,
    walk,
)
from radixkv.tree.outline import Outline, outline
from radixkv.tree.retention import Retentions
from radixkv.tree.shared_runs import SharedLeases, SharedRuns, branch_of
from radixkv.tree.spared import SparedLeaves, WaitingPrompt
from radixkv.tree.states import BLOCK_TOKENS, NodeStates
from radixkv.tree.use_times import UseTimes


class RadixTree:
    """Index of the cached pages of all namespaces by their tokens.

    Tokens are little-endian int32 bytes. Pages are indices into the KV pool, which the tree never touches. Two
    sequences share a page only after a comparison of their tokens, never because of a hash. A *lease* keeps one
    request's path from eviction; methods that take a lease raise ``InvariantError`` if it was released.

    No method recurses, and none creates work for the cyclic garbage collector.
    """

    def __init__(
        self,
        page_size: int,
        *,
        policy: EvictionPolicy | None = None,
        groups: Collection[str] = (),
        n_states: int | None = None,
        state_block_tokens: int = BLOCK_TOKENS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Creates an empty tree.

        Args:
            page_size: tokens per page.
            policy: decides which leaf ``evict`` takes; a new object for each tree. None: the least recently used.
            groups: those whose evictable pages are counted apart, for the quotas of ``evict``.
            n_states: how many states of recurrent layers there can be. Matches end where there is one. None: the
                model has no such layers.
            state_block_tokens: see ``NodeStates``.
            clock: seconds, monotonic.
        """
        self._page_size = page_size
        self._page_bytes = TOKEN_BYTES * page_size
        self._policy = LruEviction() if policy is None else policy
        self._forest = Forest(self._page_bytes, groups)
        self.states = None if n_states is None else NodeStates(self._forest, n_states, state_block_tokens)
        """The states of recurrent layers, or the tails of windows; None if the model needs none."""
        self.retentions = Retentions(self._forest)
        """The prefixes that are evicted after everything else."""
        self.demotions = Demotions(self._forest, self.states)
        """Makes sequences the next to be evicted."""
        self.changes = self._forest.changes
        """Records which computed pages enter and leave the tree, once it is told to."""
        self._spared = SparedLeaves(self._forest)
        self._leases: set[Lease] = set()
        self._shared_runs = SharedRuns(self._forest, self._leases)
        self._use_times = UseTimes(clock)
        self.evicted_age_s = 0.0
        """How long the pages evicted last had not been used, of those that no waiting prompt needs."""
        self.history = PageHistory()
        """The pages that have left the tree, for ``explain``. The trees of two tiers may have one together."""
        self.marks = Marks()
        """What negative numbers in the tokens of this class stand for: the tree compares and never reads them. The
        trees of two tiers have them together."""

    @property
    def n_pages_reachable(self) -> int:
        """Pages that a match can find: leased and evictable ones. O(1)."""
        return self._forest.n_leased + self._forest.n_evictable

    @property
    def n_pages_evictable(self) -> int:
        """Reachable pages without a lease, all of which ``evict`` can free. O(1)."""
        return self._forest.n_evictable

    @property
    def n_pages_evictable_by_group(self) -> Mapping[str, int]:
        """The evictable pages of each group that is counted apart, now and later. O(1)."""
        return self._forest.n_evictable_of

    @property
    def n_pages_leased(self) -> int:
        """Reachable pages that a lease holds. O(1)."""
        return self._forest.n_leased

    @property
    def n_pages_detached(self) -> int:
        """Unreachable pages that a lease still holds. O(1)."""
        return self._forest.n_detached

    @property
    def version(self) -> int:
        """Changes with every change that can alter the result of a match. O(1)."""
        return self._forest.version

    def namespaces(self) -> list[Namespace]:
        """Returns the namespaces that have a reachable page, or a lease that is not detached. O(namespaces)."""
        return list(self._forest.roots)

    @property
    def roots(self) -> Mapping[Namespace, Node]:
        """The root of each of these namespaces. O(1)."""
        return self._forest.roots

    def match(self, namespace: Namespace, tokens: bytes) -> int:
        """Returns the length of the longest cached prefix, in tokens of whole pages. Changes nothing. O(edges).

        With ``states`` it is the longest prefix with a state.
        """
        root = self._forest.roots.get(namespace)
        if root is None:
            return 0
        if self.states is not None:
            return self.states.deepest(root, tokens) // TOKEN_BYTES
        return n_matching_bytes(root, tokens, self._page_bytes) // TOKEN_BYTES

    def lease(self, namespace: Namespace, tokens: bytes, *, is_use: bool = True, is_hit: bool = True) -> Lease:
        """Holds the longest cached prefix of the tokens, in whole pages.

        The prefix may be empty. Splits at most one node. O(edges + log leaves), and O(pages of the split node).

        Args:
            namespace: namespace of the tokens.
            tokens: the tokens to look up.
            is_use: False leaves the order of eviction as it is: for a copy of the pages, which does not make
                another request for them more likely.
            is_hit: False for a lease that is no request's, and only adds pages, or whose request may not start:
                the eviction policy does not count it as a hit of the pages that it finds before ``count_hit``.
        """
        lease = self.open_lease(namespace, is_use=is_use, is_hit=is_hit)
        self.extend(lease, tokens)
        return lease

    def open_lease(self, namespace: Namespace, *, is_use: bool = True, is_hit: bool = True) -> Lease:
        """Opens a lease that covers no page yet. ``extend`` then leases the cached prefix. O(1).

        Takes the arguments of ``lease``, which does both.
        """
        root = self._forest.root(namespace)
        lease = Lease(root, 0, is_use=is_use, is_hit=is_use and is_hit)
        self._forest.add_lease(root)
        self._leases.add(lease)
        return lease

    def count_hit(self, lease: Lease) -> None:
        """Makes a lease a hit of the pages that it covers, and of those that it finds from now on. O(edges).

        Args:
            lease: an open lease, with ``is_use`` and without ``is_hit``, that has committed nothing.
        """
        require_open(lease)
        assert lease.is_use, "a hit is a use"
        assert not lease.is_hit, "a lease is a hit once"
        lease.is_hit = True
        self._policy.hit(path_to(lease.node)[1:])  # the root has no page

    def pages(self, lease: Lease) -> list[int]:
        """Returns all pages of the lease's path, in token order. O(pages)."""
        require_open(lease)
        return pages_of(path_to(lease.node))

    def extend(self, lease: Lease, tokens: bytes, *, needs_state: bool = True) -> list[int]:
        """Extends the lease over pages that others have committed after its end, with ``states`` up to the deepest
        state.

        Splits at most one node. O(edges + new pages + log leaves), and O(pages of the split node).

        Args:
            lease: an open lease.
            tokens: the request's tokens after the end of the lease.
            needs_state: False extends it over pages without a state, too.

        Returns:
            The pages that the lease covers in addition; none if it is detached.
        """
        require_open(lease)
        if self.states is not None and needs_state:
            tokens = tokens[: self.states.deepest(lease.node, tokens)]
        return pages_of(self._advance(lease, tokens))

    def lease_partial_page(
        self, lease: Lease, tokens: bytes, *, min_tokens: int, max_tokens: int
    ) -> PartialPage | None:
        """Holds the computed page after the end of the lease that shares the most leading tokens with a request.

        The lease is neither a use nor a hit of the page: the request soon has its tokens in a page of its own. The
        first lease on the first page of a longer run splits its node. O(edges + log children), and O(pages of the
        split node). See docs/decisions/0026-part-of-a-page.md.

        Args:
            lease: an open lease.
            tokens: the request's tokens after the end of the lease, at most a page of them.
            min_tokens: fewest tokens for which to hold a page, at least 1.
            max_tokens: most tokens that count as shared.

        Returns:
            None, without any change, if fewer tokens are shared, or if the tree has ``tokens`` as a whole page.
        """
        require_open(lease)
        end = lease.node
        if end.children is None or tokens in end.children or max_tokens < min_tokens:
            return None
        neighbours = find_neighbours(end, len(end.pages), tokens, self._page_bytes, min_common=min_tokens)
        source = neighbours.nearest_computed
        if source is None:
            return None
        node = source.node if len(source.node.pages) == 1 else self._forest.split(source.node, 1)
        held = self.fork(lease)
        held.is_use = held.is_hit = False
        self._forest.add_lease(node)
        held.node, held.n_tokens = node, held.n_tokens + self._page_size
        return PartialPage(held, node.pages[0], min(source.n_common, max_tokens))

    def commit(self, lease: Lease, tokens: bytes | bytearray, pages: Sequence[int]) -> list[int]:
        """Inserts pages after the end of the lease, and extends the lease over them.

        O(new pages) amortised; where the tree has leading pages already, O(edges + log leaves + pages of the split
        node) more.

        Commits before the KV is written: other requests find the pages at once, and may read them in the step that
        writes them. A detached lease takes no pages and stays as it is.

        Args:
            lease: an open lease.
            tokens: the tokens of the pages, which follow the end of the lease.
            pages: the pages to insert.

        Returns:
            The tree's own pages for the leading tokens that were cached already. The same number of leading
            ``pages`` are duplicates, which the caller frees once no block table contains them.

        Raises:
            InvariantError: the tokens do not fill the pages exactly.
        """
        if lease.released:
            require_open(lease)
        if len(tokens) != self._page_bytes * len(pages):
            raise InvariantError(
                f"{len(tokens)} bytes of tokens do not fill {len(pages)} pages of {self._page_bytes} bytes; "
                "commit whole pages"
            )
        if lease.node.detached:
            return []
        canonical: list[int] = []
        children = lease.node.children
        if children is not None and bytes(tokens[: self._page_bytes]) in children:
            canonical = pages_of(self._advance(lease, bytes(tokens)))
            tokens, pages = tokens[len(canonical) * self._page_bytes :], pages[len(canonical) :]
        if pages:
            if self._policy.remembers:
                self._append_recalled(lease, bytes(tokens), pages)
            else:
                lease.node = self._forest.append(lease.node, tokens, pages)
            lease.n_tokens += self._page_size * len(pages)
        return canonical

    def commit_computed_page(self, lease: Lease, tokens: bytes | bytearray, page: int) -> bool:
        """Does ``commit`` and ``mark_computed`` with one page, in the commonest case only. O(1) amortised.

        The lease must end at a leaf that it alone holds, with two or more pages, which are all computed, and which
        have no hits, no retention and are not demoted; and the eviction policy must remember no pages. Nearly all
        pages of answers are added to such a leaf.

        Args:
            lease: an open lease.
            tokens: the tokens of the page, which follow the end of the lease.
            page: the page to insert, whose KV is computed.

        Returns:
            False, without any change, in all other cases.
        """
        if lease.released:
            require_open(lease)
        if self._policy.remembers or len(tokens) != self._page_bytes:
            return False
        if not self._forest.append_computed(lease.node, tokens, page):
            return False
        lease.n_tokens += self._page_size
        return True

    def fork(self, lease: Lease) -> Lease:
        """Returns a second lease on the same path. O(edges)."""
        require_open(lease)
        for node in path_to(lease.node):
            self._forest.add_lease(node)
        second = Lease(lease.node, lease.n_tokens, is_use=lease.is_use, is_hit=lease.is_hit)
        self._leases.add(second)
        return second

    def release(self, lease: Lease) -> list[int]:
        """Lets go of the path and, if the lease is a use, marks it as used until now. O(edges + log leaves).

        Returns:
            The pages to free: those that no other lease holds and that are detached or not computed, because no
            request is left to compute them. The others stay cached.

        Raises:
            InvariantError: the lease was released before.
        """
        if lease.released:
            require_open(lease)
        lease.released = True
        self._leases.remove(lease)
        lease.branch = None
        if lease.is_use:
            self._policy.use(lease.node)
            self._use_times.add()
        return self._forest.remove_lease_of_path(lease.node)

    def mark_computed(self, lease: Lease, n_tokens: int) -> None:
        """Marks the whole pages of the path's first ``n_tokens`` as computed. O(edges not computed before).

        Called once a finished row with finite values has covered those tokens. Only computed pages stay cached
        without a lease.
        """
        if lease.released:
            require_open(lease)
        self._forest.mark_computed(lease.node, lease.n_tokens // self._page_size - n_tokens // self._page_size)

    def computed_pages(self) -> Iterator[StoredPages]:
        """Yields all computed pages that a match can find, in runs, each after the pages before it. O(pages)."""
        for node in self._forest.reachable():
            if node.n_computed:
                yield self.changes.stored_pages(node, 0, node.n_computed)

    def n_computed(self, lease: Lease) -> int:
        """Returns the length of the path's computed part, in tokens of whole pages. O(edges not computed)."""
        require_open(lease)
        n_pages = sum(len(node.pages) - node.n_computed for node in uncomputed_nodes(lease.node))
        return lease.n_tokens - n_pages * self._page_size

    def first_uncomputed(self, lease: Lease) -> Node | None:
        """Returns the path's first node with a page that is not computed, or None. O(edges not computed)."""
        require_open(lease)
        nodes = list(uncomputed_nodes(lease.node))
        return nodes[-1] if nodes else None

    def passes_through(self, lease: Lease, nodes: AbstractSet[Node]) -> bool:
        """Returns whether the lease's path contains one of the nodes. O(edges)."""
        require_open(lease)
        return not nodes.isdisjoint(upwards(lease.node))

    def detach_uncomputed(self, lease: Lease) -> list[int]:
        """Detaches the lease's path from its first page that is not computed, with the subtree below it.

        O(edges + subtree · log leaves). See docs/decisions/0001-undo-is-detachment.md.

        Returns:
            The pages that no lease holds, which are free now.
        """
        top = self.first_uncomputed(lease)
        if top is None or top.detached:
            return []
        if top.n_computed:
            self._forest.split(top, top.n_computed)
        return self._forest.detach(top)

    def detach(self, namespace: Namespace, tokens: bytes = b"") -> list[int]:
        """Makes every sequence that begins with ``tokens`` unreachable. O(edges + subtree · log leaves).

        Counts whole pages of ``tokens`` only; an empty prefix detaches the whole namespace. The prefix's own pages
        go too, from the end back to the page after which another cached sequence branches off; so do those of a
        prefix of which only the beginning is cached. Leased pages are freed with their last lease, and a commit on
        such a lease does nothing.

        Returns:
            The pages that no lease holds, which are free now.
        """
        root = self._forest.roots.get(namespace)
        if root is None:
            return []
        n_bytes = len(tokens) - len(tokens) % self._page_bytes
        if not n_bytes:
            return self._drop(root)
        path, end, top, n_partial = walk(root, tokens[:n_bytes], self._page_bytes)
        if top is not None:
            end += n_partial * self._page_bytes
        elif path:
            top = path[-1]
        # Cached pages that follow a shorter match belong to other sequences.
        if top is None or (end < n_bytes and (n_partial or top.children is not None)):
            return []
        return self._drop(first_without_branch(top))

    def evict(
        self,
        n_pages: int,
        quotas: Mapping[str, int] | None = None,
        *,
        n_beyond: int = 0,
        waiting: Iterable[WaitingPrompt] = (),
        expected: Iterable[WaitingPrompt] = (),
        n_required: int | None = None,
    ) -> list[EvictedRun]:
        """Frees ``n_pages`` pages, or all that can be evicted if there are fewer.

        First go pages that are neither retained nor needed by one of the prompts, in the policy's order; then
        needed pages, those of ``expected`` prompts before those of ``waiting`` ones, and those needed last first;
        then retained pages; last, retained pages that are needed. The pages of a leaf go from its end.

        O(pages + log leaves + groups) a run, a digest of each page before it that has none yet, and the cost of
        ``SparedLeaves.update``.

        Args:
            n_pages: how many pages to free.
            quotas: the most pages to take of each group that is counted apart, and of all others together under
                ``""``; who is left out loses none. None: there is no limit.
            n_beyond: the most pages to free in addition, where that ends the last leaf.
            waiting: prompts that will be looked up soon, the first one first.
            expected: prompts that may be looked up, the first one first.
            n_required: how many of the pages must be freed although a waiting prompt needs them or they are
                retained, if there are no others; the rest is only freed of other pages. None: all of them.
        """
        runs: list[EvictedRun] = []
        self._spared.update(waiting, expected)
        n_required = n_pages if n_required is None else n_required
        for run in evict_leaves(self._forest, self._policy, n_pages, quotas, n_beyond, self._spared, n_required):
            self.history.add(run.digests, is_evicted=True)
            runs.append(run)
        ages = [run.age for run in runs if run.age is not None]
        if ages:
            self.evicted_age_s = self._use_times.seconds_since(ages[-1])
        return runs

    def reserve_unneeded_state(self, namespace: Namespace, waiting: Iterable[WaitingPrompt]) -> int | None:
        """Takes a slot for a state that is at no node yet, as ``NodeStates.reserve`` does, and for it evicts no
        state that a waiting prompt needs, or of a retained prefix. The cost of ``SparedLeaves.update``, and
        O(states that stay)."""
        assert self.states is not None
        self._spared.update(waiting)
        return self.states.reserve(
            namespace,
            may_evict=lambda state: (
                state.node is None or not (state.node.n_retentions or self._spared.n_needed(state.node))
            ),
        )

    def continuation(self, lease: Lease, tail: bytes, n_tokens: int) -> bytes:
        """Returns up to ``n_tokens`` tokens by which cached sequences go on after a request's; changes nothing.

        They come from computed pages of the lease's namespace, and are none if the lease is detached. Where several
        sequences go on, it is the one that would be evicted last. O(edges after the lease + tokens).

        Args:
            lease: an open lease.
            tail: the request's tokens after the end of the lease, of whole pages or not.
            n_tokens: how many tokens to return at most.
        """
        require_open(lease)
        return continuation(lease.node, tail, n_tokens * TOKEN_BYTES, self._page_bytes)

    def shared_runs(self, leases: Sequence[Lease | None]) -> list[SharedLeases]:
        """Returns the runs of pages that several of the leases hold, for attention to read once. O(edges).

        The result stays valid while these leases are open. None stands for a request without a lease.
        """
        return self._shared_runs.find(leases)

    def explain(
        self, namespace: Namespace, tokens: bytes, *, contents: bool = True, max_namespaces: int | None = None
    ) -> Explanation:
        """Explains why the match of the tokens ends where it does. The cost is that of ``explain_match``.

        Without ``contents`` it reveals nothing finer than whole pages, and ignores other namespaces. Those are also
        ignored if there are more than ``max_namespaces`` in all.
        """
        explanation = explain_match(
            self._forest.roots,
            namespace,
            tokens,
            self._page_bytes,
            self.history,
            self.marks,
            contents=contents,
            max_namespaces=max_namespaces,
        )
        if self.states is None:
            return explanation
        n_prompt = len(tokens) // TOKEN_BYTES
        return explain_state(explanation, self.match(namespace, tokens), n_prompt, self.states.block_tokens)

    def outline(self, *, max_nodes: int, max_visited: int) -> Outline[Node]:
        """Returns the nodes with the most pages in and below them; the cost is that of ``outline``."""
        return outline(self._forest.roots.values(), self._policy.age, max_nodes=max_nodes, max_visited=max_visited)

    def last_use(self, node: Node) -> tuple[int, float] | None:
        """Returns how many uses of the tree and how many seconds have passed since the node's last use.

        None if its ``EvictionPolicy.age`` is None.
        """
        age = self._policy.age(node)
        return None if age is None else (age, self._use_times.seconds_since(age))

    def reachable_pages(self) -> Iterator[int]:
        """Yields every page that a match can find. O(pages)."""
        for node in self._forest.reachable():
            yield from node.pages

    def detached_pages(self) -> Iterator[int]:
        """Yields every unreachable page that a lease holds. O(edges of the leases + pages)."""
        for node in detached_nodes(self._leases):
            yield from node.pages

    def record_changes(self) -> ChangeLog:
        """Begins to record what the tree gets and loses; returns the record. The tree must be empty. O(1)."""
        assert not self.n_pages_reachable, "pages that are there already are not recorded"
        self.changes.is_on = True
        return self.changes

    def pages_by_group(self) -> Counter[str]:
        """Returns how many pages the namespaces of each group have, with detached ones. O(nodes)."""
        n_pages: Counter[str] = Counter()
        for node in (*self._forest.reachable(), *detached_nodes(self._leases)):
            n_pages[node.namespace.group] += len(node.pages)
        return n_pages

    def check(self, *, deep: bool = True) -> None:
        """Checks the consistency of the tree. O(pages + edges of the leases), and a sort of the evictable leaves.

        Args:
            deep: False compares counts only, O(1).

        Raises:
            InvariantError: a bug in radixkv.
        """
        if deep:
            check_forest(self._forest, self._leases)
            if self.states is not None:
                self.states.check()
        else:
            check_counts(self._forest)

    def _drop(self, top: Node) -> list[int]:
        """Detaches a subtree on request, and notes its computed pages. O(its pages + nodes · log leaves)."""
        for node in self._forest.below(top):
            if node.n_computed:
                self.history.add(self.changes.stored_pages(node, 0, node.n_computed).digests, is_evicted=False)
        return self._forest.detach(top)

    def _append_recalled(self, lease: Lease, tokens: bytes, pages: Sequence[int]) -> None:
        """Adds pages after the end of the lease, with the hits that the eviction policy remembers of them."""
        end, page_bytes = lease.node, self._page_bytes
        digest = digest_at(end, len(end.pages), page_bytes)
        digests: list[int] = []
        for start in range(0, len(tokens), page_bytes):
            digest = chained_xxh3_64(digest, tokens[start : start + page_bytes])
            digests.append(digest)
        first = 0
        for n_hits, run in groupby(self._policy.recall(digests)):
            last = first + sum(1 for _ in run)
            run_tokens = tokens[first * page_bytes : last * page_bytes]
            lease.node = self._forest.append(lease.node, run_tokens, pages[first:last], n_hits)
            first = last

    def _advance(self, lease: Lease, tokens: bytes) -> list[Node]:
        """Extends the lease over the cached prefix of the tokens after its end; returns the nodes it gained."""
        path, end, partial, n_pages = walk(lease.node, tokens, self._page_bytes)
        if partial is not None:
            path.append(self._forest.split(partial, n_pages))
            end += n_pages * self._page_bytes
        if path:
            for node in path:
                self._forest.add_lease(node)
            lease.node = path[-1]
            lease.branch = branch_of(lease)  # others may hold the nodes that it gained
            lease.n_tokens += end // TOKEN_BYTES
            if lease.is_hit:
                self._policy.hit(path)
        return path
