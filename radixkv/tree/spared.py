"""Leaves that are evicted late, because prompts that wait will need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

from radixkv.tree.forest import Forest
from radixkv.tree.node import Namespace, Node, walk

WaitingPrompt: TypeAlias = tuple[Namespace, bytes]
"""Namespace and tokens of a prompt that will be looked up soon."""


class _Place(NamedTuple):
    """A node, and how to see whether it still has the same tokens."""

    node: Node
    key: bytes | bytearray
    """The object that had its tokens: a split replaces it."""
    n_bytes: int
    """Its length: new pages extend it."""
    is_computed: bool
    """Whether all its pages were computed; if so, only an eviction cuts it."""


class _Match(NamedTuple):
    """The cached prefix of a prompt."""

    end: _Place
    """The last node that matches as a whole, or the root."""
    n_bytes: int
    """Bytes of the prompt up to the end of it."""
    partial: _Place | None
    """The node after it, if only leading pages of it match."""
    n_partial: int
    """Leading pages of ``partial`` that match."""


class _Need(NamedTuple):
    """A prompt that needs leading pages of a node, and more of them than any prompt before it."""

    order: int
    """Index of the prompt."""
    n_pages: int


_HeapEntry: TypeAlias = tuple[bool, int, int, Node]


class SparedLeaves:
    """The evictable leaves whose pages are all needed by waiting prompts. An eviction takes them after all others.

    Before each eviction the tree is told which prompts wait (``update``). So nothing has to be kept right while
    they come and go, and while nodes are split, grow and leave the tree. The match of a prompt is kept, and used
    again as long as its last node is the same. Matches are neither uses nor hits, and split nothing.

    Args:
        forest: the nodes of the tree.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._leaves = forest.evictable
        self._matches: dict[WaitingPrompt, _Match] = {}
        self._n_waiting = 0
        """Prompts that wait; the others are expected."""
        self._needs: dict[Node, list[_Need]] = {}
        """What is needed of each node; later prompts, which need more pages, come last."""
        self._cut: set[Node] = set()
        """The nodes that lost pages in the last eviction."""
        self._heap: list[_HeapEntry] | None = None
        """The spared leaves: retained ones last, then those first that are needed last. None until it is asked for
        in an eviction."""

    @property
    def is_sparing(self) -> bool:
        """Whether any prompt needs a page; if not, no other method but ``update`` does anything. O(1)."""
        return bool(self._matches)

    def update(self, waiting: Iterable[WaitingPrompt], expected: Iterable[WaitingPrompt] = ()) -> None:
        """Begins an eviction: from now on those leaves are spared that these prompts need, the first one first.

        Expected prompts come after those that wait, and need their leaves less: see ``is_waited_for``.

        O(1) for each prompt whose match has not changed, else a match; and O(log leaves) for each leaf that is
        spared now and was not before, or was spared before and is not now.
        """
        self._heap = None
        needed = [prompt for prompt in waiting if prompt[0] in self._forest.roots]
        self._n_waiting = len(needed)
        needed += [prompt for prompt in expected if prompt[0] in self._forest.roots]
        if not (needed or self._matches):
            return
        matches: dict[WaitingPrompt, _Match] = {}
        self._needs = {}
        for order, prompt in enumerate(needed):
            root = self._forest.roots[prompt[0]]
            matches[prompt] = match = self._match(prompt[1], root, self._matches.get(prompt))
            self._add_needs(match, order)
        self._matches = matches
        self._cut.clear()
        for leaf in [leaf for leaf in self._leaves.spared if self.n_needed(leaf) < len(leaf.pages)]:
            self._leaves.end_sparing(leaf)
        for node in self._needs:
            self.spare(node)

    def n_needed(self, leaf: Node) -> int:
        """Returns how many leading pages of a leaf are needed. O(1)."""
        needs = self._needs.get(leaf)
        return needs[-1].n_pages if needs else 0

    def is_waited_for(self, leaf: Node) -> bool:
        """Returns whether the last pages of a spared leaf are needed by a prompt that waits. O(1)."""
        return self._needs[leaf][-1].order < self._n_waiting

    def note_cut(self, leaf: Node) -> None:
        """Notes that a candidate has lost its last pages: it is spared now if all that is left is needed."""
        self._cut.add(leaf)
        self.spare(leaf)

    def spare(self, node: Node) -> None:
        """Spares a node if it is an evictable leaf, and all of it is needed. O(log leaves)."""
        needs = self._needs.get(node)
        if needs is None or node.children is not None or node.n_leases or needs[-1].n_pages < len(node.pages):
            return
        if node not in self._leaves.spared:
            self._leaves.spare(node)
        if self._heap is not None:
            heappush(self._heap, self._entry(node))

    def last_needed(self, left: Mapping[str, int] | None) -> Node | None:
        """Returns the spared leaf to evict first if any must be: of those that are not retained, the one that is
        needed last. O(spared leaves) once in an eviction, then O(log of them) amortised.

        Args:
            left: the pages that may be evicted of each group, as in ``RadixTree.evict``; they only become fewer.
        """
        if self._heap is None:
            self._heap = [self._entry(leaf) for leaf in self._leaves.spared]
            heapify(self._heap)
        while self._heap:
            leaf = self._heap[0][-1]
            if left is None or left.get(self._leaves.group_of(leaf), 0) > 0:
                return leaf
            heappop(self._heap)
        return None

    def n_needed_earlier(self, leaf: Node) -> int:
        """Returns how many leading pages of ``last_needed`` are needed earlier than its last ones. O(1)."""
        needs = self._needs[leaf]
        return needs[-2].n_pages if len(needs) > 1 else 0

    def pop_last_needed(self) -> None:
        """Takes ``last_needed`` out of all evictable leaves, because its last pages are evicted. O(log leaves)."""
        assert self._heap is not None
        self._leaves.remove(heappop(self._heap)[-1])

    def spare_rest(self, leaf: Node) -> None:
        """Spares what is left of a leaf that was taken out. O(log leaves)."""
        self._cut.add(leaf)
        needs = self._needs[leaf]
        order, _ = needs.pop()
        if not needs or needs[-1].n_pages < len(leaf.pages):
            needs.append(_Need(order, len(leaf.pages)))
        self._leaves.add(leaf)
        self.spare(leaf)

    def _match(self, tokens: bytes, root: Node, known: _Match | None) -> _Match:
        """Returns the cached prefix of a prompt. O(1) if it is as it was known to be."""
        page_bytes = self._forest.page_bytes
        end, n_bytes = root, 0
        # If the known match ends at another root, the namespace was empty meanwhile, and the match is void.
        if known is not None and (
            known.end.node is root or (known.end.node.parent is not None and self._is_unchanged(known.end))
        ):
            end, n_bytes = known.end.node, known.n_bytes
            if known.partial is not None:
                if known.partial.node.parent is end and self._is_unchanged(known.partial):
                    return known
            elif end.children is None or tokens[n_bytes : n_bytes + page_bytes] not in end.children:
                return known
        path, n_more, partial, n_partial = walk(end, tokens[n_bytes:], page_bytes)
        end = path[-1] if path else end
        return _Match(_place(end), n_bytes + n_more, None if partial is None else _place(partial), n_partial)

    def _is_unchanged(self, place: _Place) -> bool:
        """Whether a node is still reachable, and has the same tokens."""
        node = place.node
        return (
            node.key is place.key
            and len(node.key) == place.n_bytes
            and place.is_computed
            and not node.detached
            and node not in self._cut
        )

    def _add_needs(self, match: _Match, order: int) -> None:
        """Adds what a prompt needs. O(edges that no prompt before it needs as a whole)."""
        if match.partial is not None:
            self._add_need(match.partial.node, order, match.n_partial)
        node = match.end.node
        while node.parent is not None and self._add_need(node, order, len(node.pages)):
            node = node.parent

    def _add_need(self, node: Node, order: int, n_pages: int) -> bool:
        """Adds a need; returns False if a prompt before it needs as many pages."""
        needs = self._needs.get(node)
        if needs is None:
            self._needs[node] = [_Need(order, n_pages)]
        elif needs[-1].n_pages < n_pages:
            needs.append(_Need(order, n_pages))
        else:
            return False
        return True

    def _entry(self, leaf: Node) -> _HeapEntry:
        return leaf.n_retentions > 0, -self._needs[leaf][-1].order, leaf.serial, leaf


def _place(node: Node) -> _Place:
    return _Place(node, node.key, len(node.key), node.n_computed == len(node.pages))
