"""The table of a segment: which page each slot has, and when it was last used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap

import numpy as np
import numpy.typing as npt

from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES

WORD_BYTES = 8
ENTRY_BYTES = 3 * WORD_BYTES
"""Bytes that a slot takes in the table."""
_SET_SLOTS = 256
"""Least slots of a set, if there are so many."""
_N_FIRST = 16
"""Slots that are sorted first when a page takes one: the others are all in use."""
LATEST_NS = 60 * 10**9
"""A use that is further in the future is from before the machine restarted, in a segment that outlives that."""


class SlotTable:
    """Three words for each slot, in memory that several processes map.

    A page may be in the slots of one *set*, which its key's digest chooses, so that nothing but the slot itself
    changes when a page comes or goes: no list can be left half changed by a process that dies.

    The words are the beginning of the page's digest, that of the page before it, and the time of the last use, on
    the machine's ``CLOCK_MONOTONIC``, which nobody sets. The
    first is the *commit word*: 0 as long as the slot has no whole page. It is written last, and only by the holder
    of the slot's lock. Anyone may set it to 0 at any time, which makes the slot free. Whoever reads words without
    that lock gets a hint: the page may be another one a moment later. A word is read and written at once, as it is
    aligned.

    Args:
        memory: the segment.
        start: where the table is in it.
        n_slots: slots that there is room for; a few at the end remain unused if they do not fill the sets.
    """

    def __init__(self, memory: mmap, start: int, n_slots: int) -> None:
        self._n_sets = max(1, n_slots // _SET_SLOTS)
        self._n_ways = n_slots // self._n_sets
        self.n_slots = self._n_sets * self._n_ways
        """Slots that are used."""
        n_bytes = self.n_slots * WORD_BYTES
        self._memory, self._start = memory, start
        self._digests, self._parents, self._ticks = (
            memoryview(memory)[first : first + n_bytes].cast("Q")
            for first in range(start, start + 3 * n_bytes, n_bytes)
        )

    @property
    def n_pages(self) -> int:
        """Slots with a page. O(slots), 1 µs for each 4,000."""
        return int(np.count_nonzero(np.frombuffer(self._digests, np.uint64)))

    def find(self, key: bytes) -> int | None:
        """Returns a slot that seems to have a page, None if there is none. O(slots of a set), 1 µs."""
        digest = key[:WORD_BYTES]
        first = self._start + self._first_slot(digest) * WORD_BYTES
        end = first + self._n_ways * WORD_BYTES
        at = self._memory.find(digest, first, end)
        while at >= 0 and (at - self._start) % WORD_BYTES:  # the end of one word and the beginning of the next
            at = self._memory.find(digest, at + 1, end)
        return None if at < 0 else (at - self._start) // WORD_BYTES

    def has(self, slot: int, key: bytes) -> bool:
        """Returns whether a slot seems to have a page. Under the slot's lock, whether it has. O(1)."""
        return self._digests[slot] == _word(key[:WORD_BYTES])

    def is_free(self, slot: int) -> bool:
        """Returns whether a slot seems to have no page. O(1)."""
        return not self._digests[slot]

    def tick(self, slot: int) -> int:
        """Returns the time of the last use of a slot; a free one may have any. O(1)."""
        return self._ticks[slot]

    def touch(self, slot: int, tick: int) -> None:
        """Notes a use. O(1)."""
        if not tick <= self._ticks[slot] <= tick + LATEST_NS:
            self._ticks[slot] = tick

    def touch_chain(self, key: bytes, tick: int, n_most: int) -> int:
        """Notes a use of a page and of those before it, which come out as used later. O(pages).

        Args:
            key: of the last page.
            tick: time of the use.
            n_most: most pages that are touched.

        Returns:
            How many pages were touched.
        """
        slot, n_pages = self.find(key), 0
        while slot is not None and n_pages < n_most:
            self.touch(slot, tick + n_pages)
            n_pages += 1
            slot = self.find(self._parents[slot].to_bytes(WORD_BYTES, "little"))
        return n_pages

    def first_to_go(self, key: bytes, now: int) -> Iterator[tuple[int, int]]:
        """Yields the slots that a page may take: free ones, then the least recently used. O(slots of a set).

        Yields:
            The time of each slot's last use, 0 of a free one, and the slot.
        """
        first = self._first_slot(key[:WORD_BYTES])
        ticks = np.array(self._ticks[first : first + self._n_ways], np.uint64)
        ages = np.where(ticks > now + LATEST_NS, np.uint64(0), ticks)
        order = np.argpartition(ages, min(_N_FIRST, len(ages)) - 1)
        for some in (order[:_N_FIRST], order[_N_FIRST:]):
            for way in some[np.argsort(ages[some], kind="stable")].tolist():
                yield int(ticks[way]), first + way

    def commit(self, slot: int, key: bytes, tick: int) -> None:
        """Notes that a slot has a page, for the holder of its lock, who has written all of the page. O(1)."""
        self._parents[slot] = _word(key[DIGEST_BYTES : DIGEST_BYTES + WORD_BYTES])
        self._ticks[slot] = tick
        self._digests[slot] = _word(key[:WORD_BYTES])

    def clear(self, slot: int) -> None:
        """Makes a slot free. Its bytes may be overwritten once its lock is held. O(1)."""
        self._digests[slot] = 0
        self._ticks[slot] = 0

    def below(self, key: bytes, leading: Sequence[bytes] = ()) -> list[int]:
        """Returns the slots of what ``PageStore.remove`` removes. O((slots + leading pages) · log slots)."""
        digests = np.array(self._digests, np.uint64)
        slots = np.flatnonzero(digests)
        digests, parents = digests[slots], np.array(self._parents, np.uint64)[slots]
        children = _Children(parents)
        is_gone = digests == _word(key[:WORD_BYTES])
        level = children.find(np.array([_word(key[:WORD_BYTES])], np.uint64))
        while len(level := level[~is_gone[level]]):
            is_gone[level] = True
            level = children.find(np.unique(digests[level]))
        words = np.array([_word(before[:WORD_BYTES]) for before in leading], np.uint64)
        n_children, n_copies = _count(words, parents[~is_gone]), _count(words, digests)
        first, n_removed = len(leading), 0
        while first and n_children[first - 1] == n_removed:  # nothing else continues the page before
            first -= 1
            n_removed = n_copies[first]
        is_gone |= np.isin(digests, words[first:])
        return [int(slot) for slot in slots[is_gone]]

    def close(self) -> None:
        """Lets go of the memory."""
        for words in (self._digests, self._parents, self._ticks):
            words.release()

    def _first_slot(self, digest: bytes) -> int:
        return int.from_bytes(digest, "little") % self._n_sets * self._n_ways


class _Children:
    """Finds the pages that continue others, by the words of those.

    Args:
        parents: of each page, the word of the page before it.
    """

    def __init__(self, parents: npt.NDArray[np.uint64]) -> None:
        self._order = np.argsort(parents)
        self._parents = parents[self._order]

    def find(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """Returns the places of the pages that continue any of these. O(words · log pages + pages found)."""
        firsts = np.searchsorted(self._parents, words, "left")
        counts = np.searchsorted(self._parents, words, "right") - firsts
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        found: npt.NDArray[np.intp] = self._order[np.repeat(firsts, counts) + within]
        return found


def _count(words: npt.NDArray[np.uint64], among: npt.NDArray[np.uint64]) -> list[int]:
    """Returns how often each of some different words is among others. O(all of them · log words)."""
    order = np.argsort(words)
    counts = np.zeros(len(words), np.int64)
    if len(words):
        places = np.minimum(np.searchsorted(words[order], among), len(words) - 1)
        counts[order] = np.bincount(places[words[order][places] == among], minlength=len(words))
    return counts.tolist()


def _word(digest: bytes) -> int:
    """Returns the word with these bytes."""
    return int.from_bytes(digest, "little")
