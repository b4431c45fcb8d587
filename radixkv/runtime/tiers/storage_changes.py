"""Log of the changes of the pages behind the host tier, for events."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from radixkv.runtime.tiers.stores.joined_store import JoinedStore
from radixkv.runtime.tiers.stores.page_keys import KeyChain
from radixkv.tree.changes import Change, RemovedPages, StoredPages
from radixkv.tree.digest import chained_xxh3_64, namespace_digest
from radixkv.tree.node import Namespace


class StorageChanges:
    """Records which pages enter and leave the stores, as far as their tokens are known.

    Keys do not tell tokens. So pages that the store had at the start are unknown, until a prompt with their tokens
    is written or fetched. Memory: some 500 bytes a page, once it is on.

    Args:
        store: all stores; a page is gone once none of them has it.
        chain: makes the store's keys.
        page_bytes: bytes of one page's tokens.
    """

    def __init__(self, store: JoinedStore, chain: KeyChain, page_bytes: int) -> None:
        self.is_on = False
        """Whether changes are recorded."""
        self._store = store
        self._chain = chain
        self._page_bytes = page_bytes
        self._known: dict[bytes, StoredPages] = {}
        """By key, each page that was stored and not removed since."""
        self._changes: list[Change] = []

    @property
    def n_pages(self) -> int:
        """Pages that were stored and not removed since. O(1)."""
        return len(self._known)

    def add_stored(self, namespace: Namespace, tokens: bytes) -> None:
        """Records what the store has of a sequence. O(tokens); does nothing unless it is on."""
        if not self.is_on:
            return
        keys = self._chain.keys(namespace, tokens)
        digest = namespace_digest(namespace)
        parent: int | None = None
        new: list[StoredPages] = []
        for index, key in enumerate(keys[: self._store.run(keys)]):
            page = tokens[index * self._page_bytes : (index + 1) * self._page_bytes]
            digest = chained_xxh3_64(digest, page)
            if key in self._known:
                self._add_run(new)
                new = []
            else:
                self._known[key] = StoredPages(namespace, parent, (digest,), page)
                new.append(self._known[key])
            parent = digest
        self._add_run(new)

    def take(self) -> list[Change]:
        """Returns the changes since the last call. O(pages that have changed)."""
        for key in self._store.take_removed() if self.is_on else ():
            if key in self._known and not self._store.run((key,)):  # else it was stored again meanwhile
                self._changes.append(RemovedPages(self._known.pop(key).digests))
        changes, self._changes = self._changes, []
        return changes

    def stored_pages(self) -> Iterator[StoredPages]:
        """Yields each page that is known, in the order in which they became so. O(pages)."""
        yield from self._known.values()

    def _add_run(self, pages: Sequence[StoredPages]) -> None:
        if pages:
            digests = array("Q", [digest for page in pages for digest in page.digests])
            tokens = b"".join(page.tokens for page in pages)
            self._changes.append(StoredPages(pages[0].namespace, pages[0].parent_digest, digests, tokens))
