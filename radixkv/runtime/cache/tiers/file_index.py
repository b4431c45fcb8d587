"""Which page files there are, and which of them goes first when room is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sortedcontainers import SortedSet

from radixkv.runtime.cache.tiers.page_keys import DIGEST_BYTES


class IndexedFile(NamedTuple):
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


class FileIndex:
    """Page files by key. The first to go is the least recently used page that no other page continues.

    A page is of no use without those before it, and those may not have been read for long: the host tier has them.
    Keys contain the digest of their parent's key, so that the files' names are all that the order needs.

    ``in``, ``len`` and ``run`` are safe in any thread; everything else needs a lock.
    """

    def __init__(self, files: Iterable[IndexedFile] = ()) -> None:
        self._files = {file.digest: file for file in files}
        self._n_children: dict[bytes, int] = {}
        """Number of files whose key continues a digest, if not 0."""
        for file in self._files.values():
            self._n_children[file.parent] = self._n_children.get(file.parent, 0) + 1
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

    def add(self, file: IndexedFile) -> None:
        """Adds a file that is not in the index. O(log files)."""
        assert file.digest not in self._files
        self._files[file.digest] = file
        self.n_bytes += file.n_bytes
        self._n_children[file.parent] = self._n_children.get(file.parent, 0) + 1
        if parent := self._files.get(file.parent):
            self._leaves.discard((parent.tick, parent.digest))
        if file.digest not in self._n_children:
            self._leaves.add((file.tick, file.digest))

    def touch(self, key: bytes, tick: int) -> None:
        """Notes a use of a file, if the file is in the index. O(log files)."""
        digest = key[:DIGEST_BYTES]
        if (file := self._files.get(digest)) is None:
            return
        self._files[digest] = file._replace(tick=tick)
        if digest not in self._n_children:
            self._leaves.discard((file.tick, digest))
            self._leaves.add((tick, digest))

    def remove(self, key: bytes) -> IndexedFile | None:
        """Removes a file and returns it; None if it is not in the index. O(log files)."""
        if (file := self._files.pop(key[:DIGEST_BYTES], None)) is None:
            return None
        self.n_bytes -= file.n_bytes
        self._leaves.discard((file.tick, file.digest))
        self._n_children[file.parent] -= 1
        if not self._n_children[file.parent]:
            del self._n_children[file.parent]
            if parent := self._files.get(file.parent):
                self._leaves.add((parent.tick, parent.digest))
        return file

    def is_continued(self, key: bytes) -> bool:
        """Returns whether the index has a page that continues ``key``. O(1)."""
        return key[:DIGEST_BYTES] in self._n_children

    def first_to_go(self) -> IndexedFile | None:
        """Returns the least recently used page that no other page continues; None if there is none. O(1)."""
        return self._files[self._leaves[0][1]] if self._leaves else None

    def files(self) -> list[IndexedFile]:
        """Returns all files. O(files)."""
        return list(self._files.values())

    def files_below(self, key: bytes) -> list[IndexedFile]:
        """Returns the files of all pages that continue ``key``, and its own if it is a page's. O(files)."""
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for file in self._files.values():
            children[file.parent].append(file.digest)
        found = [key[:DIGEST_BYTES]]
        for digest in found:
            found += children[digest]
        return [self._files[digest] for digest in found if digest in self._files]

    def remove_below(self, key: bytes, leading: Sequence[bytes] = ()) -> list[IndexedFile]:
        """Removes ``files_below`` of a key, and leading pages that no other page continues then. O(files).

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
