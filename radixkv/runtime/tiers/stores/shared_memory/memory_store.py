"""A page store in memory that the servers of one machine map, so that each finds what the others have computed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from radixkv.runtime.step.page_copier import MappedSlots
from radixkv.runtime.tiers.stores.indexed_store import RareWarnings
from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES, KEY_BYTES, StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageCounts, Removal, StoreHealth
from radixkv.runtime.tiers.stores.page_value import KEY_AT, DamagedPage, PageHeader, copy_page
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from radixkv.runtime.tiers.stores.shared_memory.slot_locks import SlotLocks
from radixkv.runtime.tiers.stores.shared_memory.slot_table import LATEST_NS
from radixkv.runtime.tiers.stores.transfer_threads import Transfer, TransferThreads, Urgency

logger = logging.getLogger(__name__)

N_THREADS = 2
"""Threads that copy pages."""
MAX_PENDING_BYTES = 256 << 20
"""Stores that wait at once; more are dropped."""
WARNING_PAUSE_S = 60.0
MAX_SPARED_PAGES = 2048
"""Pages that one ``spare`` marks at most, some 2 µs each."""
SPARE_PAUSE_S = 1.0
"""After it has marked pages, ``spare`` does nothing for so long."""
MAX_TRIES = 3
"""How often a page looks for a slot: another thread may use all those that it has found."""
MAX_LENT_PAGES = 256
"""Pages that are lent at once. The kernel goes through the locks that are held, also by other servers, when it is
asked for one more, so that a loan of 256 takes the scheduler's thread 2 to 4 ms, and one of 1,024 8 to 16 ms."""
COUNT_PAUSE_S = 1.0
"""How old the number of pages may be."""


class SharedMemoryStore:
    """A ``PageStore`` in a segment that other servers read and write, too.

    ``run`` reads the segment's own table, so nothing has to be looked up. A use of a page is that it is read,
    written or spared, and never that someone asks whether it is there; all pages before it count as used after it.
    So a set of slots gives up the least recently used page, and the end of a prefix before its beginning.

    Whoever writes a slot holds its lock, empties the commit word, writes header and page, and the commit word
    last. Whoever reads one shares its lock, and compares the commit word under it. A slot whose lock another has is
    a miss for readers, and no choice for writers: nobody waits. The kernel frees the locks of a process that dies,
    and the slot is free then, or has the whole page.

    It is a ``PageLender``, too: whoever borrows a slot shares its lock until the copy to the device has ended.

    Args:
        segment: closed with this store.
        name: the store's name in the log.
        page_bytes: size of a page.
        page_token_bytes: bytes of one page's tokens.
        n_threads: threads that copy.

    Raises:
        ConfigError: the segment has pages of another size, or has no room for one.
    """

    def __init__(
        self, segment: Segment, name: str, *, page_bytes: int, page_token_bytes: int, n_threads: int = N_THREADS
    ) -> None:
        self.page_bytes = page_bytes
        self.counts = PageCounts()
        self._page_token_bytes = page_token_bytes
        self._name = name
        self._segment = segment
        self._slots = segment.map(page_bytes, page_token_bytes)
        self._table = self._slots.table
        self._header = PageHeader(page_bytes, page_token_bytes)
        self._n_removals = 0
        """Calls of ``remove`` and ``clear``. What began before the last one adds no more pages."""
        self._removed: list[bytes] | None = None
        """Keys of pages that this store has removed, for ``take_removed``; None before its first call."""
        self._lock = threading.Lock()
        """Guards the fields above."""
        self._damage_warnings = RareWarnings(WARNING_PAUSE_S)
        self._spares_again = 0.0
        """When ``spare`` marks pages again, on ``time.monotonic``."""
        self._counted: tuple[int, float] = 0, 0.0
        """The number of pages, and when they were counted."""
        self._max_waiting_stores = max(n_threads, MAX_PENDING_BYTES // page_bytes)
        self._locks = [SlotLocks(segment.descriptor) for _ in range(n_threads)]
        """One for each thread, which takes it for a page."""
        self._lent_locks = SlotLocks(segment.descriptor)
        self._lent = Counter[int]()
        """How often each slot is lent. It is locked once."""
        self._threads = TransferThreads(n_threads, "shared-memory")

    @property
    def n_pages(self) -> int:
        """See ``PageStore``. With those of all servers, and at most a second old unless it is 0."""
        n_pages, counted = self._counted
        now = time.monotonic()
        if not n_pages or now > counted + COUNT_PAUSE_S:
            self._counted = n_pages, _ = self._table.n_pages, now
        return n_pages

    @property
    def n_bytes(self) -> int:
        """See ``PageStore``."""
        return self.n_pages * self._slots.slot_bytes

    @property
    def health(self) -> StoreHealth | None:
        """See ``PageStore``. Memory is never away."""
        return StoreHealth(0, is_away=False)

    def run(self, keys: Sequence[bytes]) -> int:
        """See ``PageStore``."""
        return next((n for n, key in enumerate(keys) if self._table.find(key) is None), len(keys))

    def has(self, key: bytes) -> bool:
        """See ``PageStore``."""
        return self._table.find(key) is not None

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        """See ``PageStore``. There is nothing to look for: ``run`` knows it."""
        return None

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``."""
        n_known, use = self.run(keys), _ChainUse(keys)
        tick = time.monotonic_ns() + n_known
        for n, key in enumerate(keys[:n_known]):
            self._use(key, tick - n)  # so that no other page takes its slot before it is read
        steps = [
            partial(self._load_page, use, *page, n < n_known)
            for n, page in enumerate(self._pages(keys, tokens, buffers))
        ]
        return self._threads.start(Urgency.LOAD, steps, len(steps), None)

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``. At most ``MAX_PENDING_BYTES`` wait at once."""
        n_accepted = max(0, self._max_waiting_stores - self._threads.n_waiting(Urgency.STORE))
        pages = self._pages(keys, tokens, buffers)[:n_accepted]
        tick, use = time.monotonic_ns() + len(pages), _ChainUse(keys[:n_accepted])
        steps = [partial(self._store_page, use, *page, tick - n, self._n_removals) for n, page in enumerate(pages)]
        return self._threads.start(Urgency.STORE, steps, len(steps), None)

    @property
    def mapped_slots(self) -> MappedSlots:
        """See ``PageLender``."""
        slots = self._slots
        first = slots.start + self._header.n_bytes
        return MappedSlots(memoryview(slots.memory), first, slots.slot_bytes, self._table.n_slots)

    @property
    def n_lendable(self) -> int:
        """See ``PageLender``. O(slots that are lent)."""
        return MAX_LENT_PAGES - self._lent.total()

    def lend(self, keys: Sequence[bytes], tokens: bytes, n_usable: int) -> list[int] | None:
        """See ``PageLender``. The header is compared, and no checksum: that would read the page."""
        size, lent = self._page_token_bytes, list[int]()
        assert len(tokens) == len(keys) * size
        slots = [self._table.find(key) for key in keys]
        if len(keys) > self.n_lendable or any(slot is None or slot >= n_usable for slot in slots):
            return None
        for index, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            assert slot is not None
            if not self._lend_page(slot, key, tokens[index * size : (index + 1) * size]):
                self._unlock(lent)
                return None
            lent.append(slot)
        return lent

    def give_back(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """See ``PageLender``. A thread notes the use a moment later: it looks for the pages before them, too."""
        self._unlock(slots)
        if keys:
            self._threads.start_unreported(Urgency.LOAD, partial(self._use_lent, keys))

    def spare(self, keys: Sequence[bytes]) -> None:
        """See ``PageStore``. Counts as a use of the first ``MAX_SPARED_PAGES`` of them; O(these) once a second."""
        now = time.monotonic()
        if now < self._spares_again:
            return
        self._spares_again = now + SPARE_PAUSE_S
        tick, n_left = time.monotonic_ns(), MAX_SPARED_PAGES
        for key in keys:
            n_left -= self._table.touch_chain(key, tick, n_left)

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """See ``PageStore``. Removes what other servers have written, too, who may write it again.

        A page that continues one which is gone is not found. It is of no use until that one is written again.
        O((slots + leading pages) · log slots): some 0.3 s for 800,000 slots.
        """
        with self._lock:
            self._n_removals += 1  # from here on stores that are under way add nothing
        slots = self._table.below(key, leading)
        with self._lock:
            for slot in slots:
                self._note_removed(slot)
                self._table.clear(slot)
        self._counted = 0, 0.0
        return Removal(self._threads.start(Urgency.REMOVAL, (), len(slots), None), len(slots))

    def clear(self) -> int:
        """See ``PageStore``."""
        with self._lock:
            self._n_removals += 1
        return self._threads.start(Urgency.REMOVAL, (), 0, None)

    def take_removed(self) -> list[bytes]:
        """See ``PageStore``. What other servers remove is not among them until a load misses it."""
        with self._lock:
            removed, self._removed = self._removed or [], []
            return removed

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        return self._threads.take_finished()

    def fileno(self) -> int:
        """See ``PageStore``."""
        return self._threads.fileno()

    def close(self, timeout_s: float) -> None:
        """See ``PageStore``. The pages stay in the segment."""
        self._lent_locks.close()
        if self._threads.close(timeout_s):
            for locks in self._locks:
                locks.close()
            self._table.close()
            with contextlib.suppress(BufferError):  # a borrower keeps the memory until it is closed
                self._slots.memory.close()
        self._segment.close()

    def _pages(
        self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]
    ) -> list[tuple[bytes, bytes, memoryview]]:
        """Returns key, tokens and buffer of each page."""
        size = self._page_token_bytes
        assert len(tokens) == len(keys) * size
        page_tokens = [tokens[first : first + size] for first in range(0, len(tokens), size)]
        return list(zip(keys, page_tokens, buffers, strict=True))

    def _load_page(
        self, use: _ChainUse, key: bytes, tokens: bytes, page: memoryview, was_found: bool, _: Transfer
    ) -> bool:
        locks = self._locks.pop()
        try:
            is_read = self._read(locks, key, tokens, page)
        finally:
            self._locks.append(locks)
            self._end_page(use)
        if was_found and not is_read:
            with self._lock:
                self.counts = self.counts._replace(n_lost=self.counts.n_lost + 1)
                if self._removed is not None:
                    self._removed.append(key)
        return is_read

    def _read(self, locks: SlotLocks, key: bytes, tokens: bytes, page: memoryview) -> bool:
        """Copies a page from its slot; returns whether it was there, and whole."""
        slot = self._table.find(key)
        if slot is None or not locks.try_lock_shared(slot):
            return False
        try:
            if not self._table.has(slot, key):
                return False  # another page has taken the slot
            self._copy_out(slot, key, tokens, page)
        except DamagedPage as error:
            self._table.clear(slot)
            self._damage_warnings.add(f"a page in {self._name} is a miss, and is removed", error)
            return False
        finally:
            locks.unlock(slot)
        return True

    def _copy_out(self, slot: int, key: bytes, tokens: bytes, page: memoryview) -> None:
        """Copies a slot's page, for holders of its lock. Raises ``DamagedPage`` if the copy is another one."""
        n_header = self._header.n_bytes
        with self._slots.value(slot, n_header + self.page_bytes) as value, value[n_header:] as content:
            copy_page(content, page)
            with value[:n_header] as header:
                self._header.check(header, key, tokens, page)

    def _store_page(
        self, use: _ChainUse, key: bytes, tokens: bytes, page: memoryview, tick: int, n_removals: int, _: Transfer
    ) -> bool:
        locks = self._locks.pop()
        try:
            return self._write(locks, key, tokens, page, tick, n_removals)
        finally:
            self._locks.append(locks)
            self._end_page(use)

    def _write(
        self, locks: SlotLocks, key: bytes, tokens: bytes, page: memoryview, tick: int, n_removals: int
    ) -> bool:
        """Copies a page to a slot, unless one has it; returns whether one has it now."""
        if n_removals != self._n_removals:
            return False
        if self._use(key, tick):
            return True
        if (slot := self._take_slot(locks, key, tick)) is None:
            return False
        try:
            self._copy_in(slot, key, tokens, page)
            with self._lock:
                if n_removals != self._n_removals:
                    return False
                if not self._use(key, tick):  # else another one has written it meanwhile, and the slot stays free
                    self._table.commit(slot, key, tick)
                    self.counts = self.counts._replace(n_written=self.counts.n_written + 1)
        finally:
            locks.unlock(slot)
        return True

    def _use(self, key: bytes, tick: int) -> bool:
        """Returns whether a page is there, and notes a use."""
        if (slot := self._table.find(key)) is None:
            return False
        self._table.touch(slot, tick)
        return True

    def _end_page(self, use: _ChainUse) -> None:
        """Notes at the end of a transfer's last page that all its pages were used, and those before them."""
        with self._lock:
            use.n_left -= 1
            is_last = not use.n_left
        if is_last:
            self._use_chain(use.keys)

    def _use_chain(self, keys: Sequence[bytes]) -> None:
        """Notes that pages were used, the last one first, and then those before them."""
        tick = time.monotonic_ns()
        for n_after, key in enumerate(reversed(keys)):
            self._use(key, tick + n_after)
        self._table.touch_chain(keys[0][DIGEST_BYTES:], tick + len(keys), self._table.n_slots)

    def _use_lent(self, keys: Sequence[bytes], _: Transfer) -> bool:
        self._use_chain(keys)
        return True

    def _lend_page(self, slot: int, key: bytes, tokens: bytes) -> bool:
        """Locks a slot, or counts one more loan of it; returns whether that can be and it has a page."""
        if not self._lent[slot] and not self._lent_locks.try_lock_shared(slot):
            return False
        self._lent[slot] += 1
        with self._slots.value(slot, self._header.n_bytes) as header:
            if self._table.has(slot, key) and self._header.is_of(header, key, tokens):
                return True
        self._unlock((slot,))  # another page has taken the slot, or it is damaged, which a load finds out
        return False

    def _unlock(self, slots: Sequence[int]) -> None:
        """Ends a loan of slots, and unlocks those that are lent no more.

        One call unlocks all of them between two slots that are still lent: nothing else is locked there.
        """
        self._lent.subtract(slots)
        self._lent = +self._lent
        for is_lent, run in groupby(sorted({*slots, *self._lent}), self._lent.__contains__):
            if not is_lent:
                unlent = list(run)
                self._lent_locks.unlock(unlent[0], unlent[-1])

    def _take_slot(self, locks: SlotLocks, key: bytes, tick: int) -> int | None:
        """Locks and empties the slot that a page takes. None if each was used since ``tick``, or is locked."""
        for _ in range(MAX_TRIES):
            now = time.monotonic_ns()
            for used, slot in self._table.first_to_go(key, now):
                if tick <= used <= now + LATEST_NS:
                    break
                if not locks.try_lock_exclusive(slot):
                    continue
                if self._table.tick(slot) == used:
                    with self._lock:
                        self._note_removed(slot)
                    self._table.clear(slot)
                    return slot
                locks.unlock(slot)  # it was used meanwhile
        return None

    def _copy_in(self, slot: int, key: bytes, tokens: bytes, page: memoryview) -> None:
        """Writes header and page of an empty slot, for the holder of its lock."""
        n_header = self._header.n_bytes
        with self._slots.value(slot, n_header + self.page_bytes) as value, value[n_header:] as content:
            value[:n_header] = self._header.make(key, tokens, page)
            copy_page(page, content)

    def _note_removed(self, slot: int) -> None:
        """Notes for ``take_removed`` that a slot's page goes. For holders of ``_lock``."""
        if self._removed is not None and not self._table.is_free(slot):
            with self._slots.value(slot, KEY_AT + KEY_BYTES) as value:
                key = bytes(value[KEY_AT:])
            if self._table.has(slot, key):  # else another page is being written
                self._removed.append(key)


class _ChainUse:
    """The pages of one load or store, which count as used at the end of the last one.

    Until then those before them may have been used earlier or later, so that they would go in another order.

    Args:
        keys: of the pages.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.n_left = len(keys)
        """Pages that have not ended."""
