"""Log of the changes of a tree's computed pages and states, for events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from radixkv.tree.digest import digest_at
from radixkv.tree.node import Namespace, Node, State


class StoredPages(msgspec.Struct, frozen=True, gc=False):
    """Consecutive pages that can be found and are computed."""

    namespace: Namespace
    parent_digest: int | None
    """Chained digest of the page before them; None if they begin their sequences."""
    digests: Sequence[int]
    """The chained digest of each page."""
    tokens: bytes
    """The pages' tokens, little-endian int32."""


class RemovedPages(msgspec.Struct, frozen=True, gc=False):
    """Pages that were stored, and cannot be found any more."""

    digests: Sequence[int]


class KeptState(msgspec.Struct, frozen=True, gc=False):
    """Prompts can go on from a state after a page."""

    page: StoredPages
    """The page at whose end the state is."""


class LostState(msgspec.Struct, frozen=True, gc=False):
    """A state that was kept is there no more; its page may stay."""

    digest: int
    """Of the page at whose end it was."""


Change = StoredPages | RemovedPages | KeptState | LostState


class ChangeLog:
    """Records which computed pages and states enter and leave a tree, in order. A page enters after the page before
    it.

    Args:
        page_bytes: bytes of one page's tokens.
    """

    def __init__(self, page_bytes: int) -> None:
        self.is_on = False
        """Whether changes are recorded. Turn it on while the tree is empty. A change then costs a digest of each
        page, and memory until ``take``."""
        self.n_pages = 0
        """Pages that were stored and not removed since."""
        self._page_bytes = page_bytes
        self._changes: list[Change] = []
        self._kept: dict[State, KeptState] = {}
        """The states that were kept and not lost since."""

    def add_stored(self, node: Node, first: int, last: int) -> None:
        """Records that the pages ``first`` to ``last - 1`` of a reachable node are computed now. O(pages)."""
        self.n_pages += last - first
        self._changes.append(self.stored_pages(node, first, last))

    def add_removed(self, node: Node, first: int, last: int) -> None:
        """Records that these pages of a node leave the tree. Call it before they do. O(pages)."""
        if first < last:
            assert node.digests is not None, "its pages were stored"
            self.n_pages -= last - first
            self._changes.append(RemovedPages(node.digests[first:last]))

    def add_kept(self, state: State) -> None:
        """Records that a state at a reachable node is computed now, if changes are recorded. O(pages without a
        digest before it)."""
        if self.is_on:
            assert state.node is not None, "it is in the tree"
            n_pages = len(state.node.pages)
            self._kept[state] = KeptState(self.stored_pages(state.node, n_pages - 1, n_pages))
            self._changes.append(self._kept[state])

    def add_lost(self, state: State) -> None:
        """Records that a state leaves the tree, if it was kept. O(1)."""
        if (kept := self._kept.pop(state, None)) is not None:
            self._changes.append(LostState(kept.page.digests[0]))

    def kept_states(self) -> Iterator[KeptState]:
        """Yields the states that prompts can go on from now."""
        yield from self._kept.values()

    def take(self) -> list[Change]:
        """Returns the changes since the last call. O(1)."""
        changes, self._changes = self._changes, []
        return changes

    def stored_pages(self, node: Node, first: int, last: int) -> StoredPages:
        """Returns some pages of a reachable node as a change. O(pages), and those before them without a digest."""
        size, parent, parent_digest = self._page_bytes, node.parent, None
        digest_at(node, last, size)
        assert node.digests is not None
        if first:
            parent_digest = node.digests[first - 1]
        elif parent is not None and parent.parent is not None:
            assert parent.digests is not None, "the digests of the node continue them"
            parent_digest = parent.digests[-1]
        tokens = bytes(node.key[first * size : last * size])
        return StoredPages(node.namespace, parent_digest, node.digests[first:last], tokens)
