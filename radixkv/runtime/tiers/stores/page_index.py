"""Which page files there are, and which of them goes first when room is needed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sortedcontainers import SortedSet

from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES


class IndexedPage(NamedTuple):
    """One page file."""

    key: bytes
    n_bytes: int
    """Bytes on disk."""
    tick: int
    """Time of the last use in nanoseconds."""

    @property
    def digest(self) -> bytes:
        """The key's own digest."""
        return self.key[:DIGEST_BYTES]

    @property
    def parent(self) -> bytes:
        """Digest of the key that this one continues."""
        return self.key[DIGEST_BYTES:]


class PageIndex:
    """Page files by key. The first to go is the least recently used page that no other page continues.

    A page is of no use without those before it, and those may not have been read for long: the host tier has them.
    Keys contain the digest of their parent's key, so that the files' names are all that the order needs. *Spared*
    pages go after all others.

    ``in``, ``len`` and ``run`` are safe in any thread; everything else needs a lock.
    """

    def __init__(self, files: Iterable[IndexedPage] = ()) -> None:
        self._files = {file.digest: file for file in files}
        self._n_children = Counter(file.parent for file in self._files.values())
        """Number of files whose key continues a digest, if not 0."""
        self._spared: dict[bytes, int] = {}
        """Place of each spared page in the order in which they are needed, by digest."""
        self._leaves = SortedSet(
            (file.tick, digest) for digest, file in self._files.items() if digest not in self._n_children
        )
        self.n_bytes = sum(file.n_bytes for file in self._files.values())
        """Bytes of all files."""

    def __contains__(self, key: bytes) -> bool:
        return key[:DIGEST_BYTES] in self._files

    def __len__(self) -> int:
        return len(self._files)

    def run(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that are in the index. O(that number)."""
        return next((n for n, key in enumerate(keys) if key not in self), len(keys))

    def add(self, file: IndexedPage) -> None:
        """Adds a file that is not in the index. O(log files)."""
        assert file.digest not in self._files
        self._files[file.digest] = file
        self.n_bytes += file.n_bytes
        self._n_children[file.parent] += 1
        if parent := self._files.get(file.parent):
            self._leaves.discard((parent.tick, parent.digest))
        self._add_leaf(file)

    def touch(self, key: bytes, tick: int) -> None:
        """Notes a use of a file, if the file is in the index. O(log files)."""
        digest = key[:DIGEST_BYTES]
        if (file := self._files.get(digest)) is None:
            return
        self._files[digest] = file._replace(tick=tick)
        self._leaves.discard((file.tick, digest))
        self._add_leaf(self._files[digest])

    def remove(self, key: bytes) -> IndexedPage | None:
        """Removes a file and returns it; None if it is not in the index. O(log files)."""
        if (file := self._files.pop(key[:DIGEST_BYTES], None)) is None:
            return None
        self.n_bytes -= file.n_bytes
        self._leaves.discard((file.tick, file.digest))
        self._n_children[file.parent] -= 1
        if not self._n_children[file.parent]:
            del self._n_children[file.parent]
            if parent := self._files.get(file.parent):
                self._add_leaf(parent)
        return file

    def spare(self, keys: Iterable[bytes]) -> None:
        """Spares these pages, the first of which is needed first, and no others any more. O(keys · log files).

        The pages before them are continued, and so stay as long as they do.
        """
        before, self._spared = self._spared, {}
        for order, key in enumerate(keys):
            self._spared.setdefault(key[:DIGEST_BYTES], order)
        for digest in before.keys() - self._spared.keys():
            if file := self._files.get(digest):
                self._add_leaf(file)
        for digest in self._spared.keys() - before.keys():
            if file := self._files.get(digest):
                self._leaves.discard((file.tick, digest))

    def is_continued(self, key: bytes) -> bool:
        """Returns whether the index has a page that continues ``key``. O(1)."""
        return key[:DIGEST_BYTES] in self._n_children

    def first_to_go(self) -> IndexedPage | None:
        """Returns the least recently used page that no other page continues; None if there is none.

        If all of them are spared, it is the one that is needed last. O(1), or O(spared pages).
        """
        if self._leaves:
            return self._files[self._leaves[0][1]]
        spared = [one for one in self._spared if one in self._files and one not in self._n_children]
        return self._files[max(spared, key=self._spared.__getitem__)] if spared else None

    def files(self) -> list[IndexedPage]:
        """Returns all files. O(files)."""
        return list(self._files.values())

    def files_below(self, key: bytes) -> list[IndexedPage]:
        """Returns the files of all pages that continue ``key``, and its own if it is a page's.

        O(files); O(1) if no page continues it.
        """
        if not self.is_continued(key):
            return [self._files[key[:DIGEST_BYTES]]] if key in self else []
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for file in self._files.values():
            children[file.parent].append(file.digest)
        found = [key[:DIGEST_BYTES]]
        for digest in found:
            found += children[digest]
        return [self._files[digest] for digest in found if digest in self._files]

    def remove_below(self, key: bytes, leading: Sequence[bytes] = ()) -> list[IndexedPage]:
        """Removes ``files_below`` of a key, and leading pages that no other page continues then.

        O(files); O(leading) if no page continues the key.

        Args:
            key: a page's, or a namespace's.
            leading: keys of the pages before that page, in order; those that are removed are at the end.

        Returns:
            The removed files.
        """
        files = self.files_below(key)
        for file in files:
            self.remove(file.key)
        for before in reversed(leading):
            if self.is_continued(before):
                break
            if (file_before := self.remove(before)) is not None:
                files.append(file_before)
        return files

    def _add_leaf(self, file: IndexedPage) -> None:
        """Lists a file among the first to go, if no other continues it, and it is not spared."""
        if file.digest not in self._n_children and file.digest not in self._spared:
            self._leaves.add((file.tick, file.digest))
