"""A page store that several servers use at once: each page is an object of a store on other machines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import compress
from typing import Any

import numpy as np

from radixkv.runtime.tiers.stores.indexed_store import IndexedStore, RareWarnings
from radixkv.runtime.tiers.stores.object_store import ObjectStore, ObjectStoreError
from radixkv.runtime.tiers.stores.page_index import IndexedPage
from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES, StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, Removal, StoreHealth
from radixkv.runtime.tiers.stores.page_value import DamagedPage, PageHeader, copy_page
from radixkv.runtime.tiers.stores.transfer_loop import Beginning, TransferLoop

logger = logging.getLogger(__name__)

LOOK_UP_TIMEOUT_S = 1.0
"""Limit of a lookup; a request waits for it before it is computed."""
LOAD_TIMEOUT_S = 1.0
"""Limit of a load, beside ``LOAD_PAGE_S`` for each page and the time of its bytes at ``LOAD_BYTES_PER_S``."""
LOAD_PAGE_S = 0.01
LOAD_BYTES_PER_S = 64 << 20
STORE_TIMEOUT_S = 5.0
"""Limit of the store or removal of one page."""
PAUSE_S = 10.0
"""How long the store is left alone after a failure."""
WARNING_PAUSE_S = 60.0
N_NAMES = 16
"""Names that one round of a lookup asks for. Three rounds find the end of 512 pages."""
MAX_STATE_NAMES = 15 * N_NAMES
"""Groups of positions in which a lookup looks for a state, from the end of the pages found; four rounds ask for so
many."""
MAX_KNOWN_PAGES = 2**18
"""Pages that are known to be in the store; about 600 bytes each. Others are looked up again."""


class SharedStore(IndexedStore):
    """A ``PageStore`` whose pages other servers read and write, too.

    It knows the pages that it has written, found or read. The others are looked up: servers write prefixes from
    their start, so a search over the keys finds where they end, with few questions. If it is wrong, a load ends
    before that.

    A failure or a call that takes too long is a miss. The store then counts as away: nothing is looked up, loaded
    or stored for ``PAUSE_S``, and what it had may be gone, so nothing is known any more.

    Args:
        objects: the objects; closed with this store.
        name: the store's name in the log.
        page_bytes: size of a page.
        page_token_bytes: bytes of one page's tokens.
        clock: returns seconds that never go back.
        max_known_pages: most pages that are known to be in the store.
    """

    def __init__(
        self,
        objects: ObjectStore,
        name: str,
        *,
        page_bytes: int,
        page_token_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        max_known_pages: int = MAX_KNOWN_PAGES,
    ) -> None:
        self._max_known_pages = max_known_pages
        self._objects = objects
        self._name = name
        self._clock = clock
        super().__init__(page_bytes, page_token_bytes)
        self._header = PageHeader(page_bytes, page_token_bytes)
        self._being_removed: set[bytes] = set()
        """Keys of pages that may still be there, but must not be found."""
        self._n_failures = 0
        self._is_away = False
        self._resumes = 0.0
        """End of the pause, on ``clock``."""
        self._damage_warnings, self._room_warnings = RareWarnings(WARNING_PAUSE_S), RareWarnings(WARNING_PAUSE_S)
        self._reads = asyncio.Semaphore(objects.n_parallel)
        self._writes = asyncio.Semaphore(max(1, objects.n_parallel // 4))
        self._loop = TransferLoop("shared-store")

    @property
    def health(self) -> StoreHealth | None:
        """See ``PageStore``."""
        return StoreHealth(self._n_failures, self._is_away)

    def look_up(self, keys: Sequence[bytes], first: int = 0, states: StateKeys | None = None) -> int | None:
        """See ``PageStore``. Takes at most ``LOOK_UP_TIMEOUT_S``."""
        if self._is_paused:
            return None
        hidden = frozenset(self._being_removed)  # they may have gone when the store has answered
        return self._loop.start(self._look_up(keys, first, states, hidden, self._n_removals))

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``. Takes no longer than ``LOAD_TIMEOUT_S`` and the constants after it say."""
        beginning = Beginning()
        load = self._load(self._pages(keys, tokens, buffers), self._n_removals, beginning)
        return self._loop.start(load, beginning)

    def store(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``. Nothing is stored while the store is away."""
        beginning = Beginning()
        store = self._store(self._pages(keys, tokens, buffers), self._n_removals, beginning)
        return self._loop.start(store, beginning, is_kept=True)

    def remove(self, key: bytes, leading: Sequence[bytes] = ()) -> Removal:
        """See ``PageStore``."""
        with self._lock:
            keys = [page.key for page in self._take_below(key, leading)]
            self._n_removals += 1
            self._being_removed.update(keys)
        return Removal(self._loop.start(self._delete(keys), is_kept=True), len(keys))

    def clear(self) -> int:
        """See ``PageStore``."""
        with self._lock:
            self._n_removals += 1
            self._take_all()
        return self._loop.start(self._delete(()))

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        return self._loop.take_finished()

    def fileno(self) -> int:
        """See ``PageStore``."""
        return self._loop.fileno()

    def close(self, timeout_s: float) -> None:
        """See ``PageStore``. Takes a second or two longer if the store does not answer."""
        self._loop.close(0.0 if self._is_paused else timeout_s)
        self._objects.close()

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._resumes

    async def _look_up(
        self,
        keys: Sequence[bytes],
        first: int,
        states: StateKeys | None,
        hidden: frozenset[bytes],
        n_removals: int,
    ) -> int:
        end, of_state, sought = 0, list[bytes](), keys[first:]
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                n_pages = await self._find_end(sought)
                if states is not None:
                    end, of_state = await self._find_state(keys[: first + n_pages], first, states)
        except (ObjectStoreError, TimeoutError) as error:
            self._fail(error, f"a lookup took longer than {LOOK_UP_TIMEOUT_S:g} s")
            return 0
        self._succeed()
        hidden |= self._being_removed
        n_pages = next((n for n in range(n_pages) if sought[n] in hidden), n_pages)
        self._note(sought[:n_pages], n_removals)
        if end <= first + n_pages and hidden.isdisjoint(of_state):
            self._note(of_state, n_removals)
        return n_pages

    async def _find_end(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that the store has, if it has none after the first that is missing."""
        low, high = 0, len(keys)
        while low < high:  # the store has what is before low, and not what is at high
            n_gaps = min(N_NAMES, high - low) - 1
            asked = [low + gap * (high - 1 - low) // max(1, n_gaps) for gap in range(n_gaps + 1)]
            found = await self._objects.have([_name_of(keys[index]) for index in asked])
            n_found = found.index(False) if False in found else len(found)
            low = asked[n_found - 1] + 1 if n_found else low
            high = asked[n_found] if n_found < len(asked) else high
        return low

    async def _find_state(self, keys: Sequence[bytes], first: int, states: StateKeys) -> tuple[int, list[bytes]]:
        """Finds the deepest state behind ``first`` and more leading keys.

        Asks for a part of each group of positions, in rounds that double, then for the end of the states in each
        group that is found, and for some pages of the state there.

        Returns:
            After how many keys it is, and the keys of its pages.
        """
        groups = states.searched(len(keys), first)[:MAX_STATE_NAMES]
        n_asked, n_names = 0, N_NAMES
        while asked := groups[n_asked : n_asked + n_names]:
            found = await self._objects.have([_name_of(states.first(keys[ends[0] - 1])) for ends in asked])
            for ends in compress(asked, found):
                end = ends[await self._find_end([states.first(keys[one - 1]) for one in ends[1:]])]
                of_state = [key for entry in states.parts(end) for key in states.all(keys[entry])]
                if await self._find_end(of_state) == len(of_state):
                    return end, of_state
            n_asked, n_names = n_asked + n_names, 2 * n_names
        return 0, []

    async def _load(
        self, pages: Sequence[tuple[bytes, bytes, memoryview]], n_removals: int, beginning: Beginning
    ) -> int:
        limit_s = LOAD_TIMEOUT_S + len(pages) * (LOAD_PAGE_S + self.page_bytes / LOAD_BYTES_PER_S)
        what_is_late = f"{len(pages)} pages of {self.page_bytes} bytes took longer than {limit_s:.1f} s"
        steps = [self._load_page(*page, n_removals, beginning) for page in pages]
        return await self._transfer(steps, what_is_late, limit_s)

    async def _load_page(
        self, key: bytes, tokens: bytes, page: memoryview, n_removals: int, beginning: Beginning
    ) -> bool:
        async with self._reads:
            beginning.note()
            if self._is_paused:
                return False
            value = await self._objects.get(_name_of(key))
        if value is None:
            self._note_lost(key)
            return False
        try:
            self._read(value, key, tokens, page)
        except DamagedPage as error:
            self._note_lost(key)
            self._damage_warnings.add(f"the page {_name_of(key)} in {self._name} is a miss, and is removed", error)
            await self._objects.delete(_name_of(key))  # else nobody would write it again
            return False
        self._note((key,), n_removals)
        return True

    def _read(self, value: memoryview, key: bytes, tokens: bytes, page: memoryview) -> None:
        """Copies an object's page to ``page``. Raises ``DamagedPage`` if it is another one."""
        n_header = self._header.n_bytes
        if value.nbytes != n_header + self.page_bytes:
            raise DamagedPage(f"it has {value.nbytes} bytes, not {n_header + self.page_bytes}")
        self._header.check(value[:n_header], key, tokens, value[n_header:])
        copy_page(value[n_header:], page)

    async def _store(
        self, pages: Sequence[tuple[bytes, bytes, memoryview]], n_removals: int, beginning: Beginning
    ) -> int:
        what_is_late = f"storing a page of {self.page_bytes} bytes took longer than {STORE_TIMEOUT_S:g} s"
        steps = [self._store_page(*page, n_removals, beginning) for page in pages]
        return await self._transfer(steps, what_is_late)

    async def _store_page(
        self, key: bytes, tokens: bytes, page: memoryview, n_removals: int, beginning: Beginning
    ) -> bool:
        name = _name_of(key)
        async with self._writes:
            beginning.note()
            if self._is_paused or n_removals != self._n_removals or key in self._being_removed:
                return False
            async with asyncio.timeout(STORE_TIMEOUT_S):
                if key not in self._index and not all(await self._objects.have([name])):
                    header = np.frombuffer(self._header.make(key, tokens, page), np.uint8)
                    value = np.concatenate((header, np.frombuffer(page, np.uint8)))
                    if not await self._objects.put(name, value.data):
                        self._room_warnings.add("a page is not stored", ObjectStoreError(f"{self._name} is full"))
                        return False
                    with self._lock:
                        self.counts = self.counts._replace(n_written=self.counts.n_written + 1)
                if not self._note((key,), n_removals):  # it may be one of those that were removed meanwhile
                    await self._objects.delete(name)
                    return False
        return True

    async def _delete(self, keys: Sequence[bytes]) -> int:
        return sum(await asyncio.gather(*map(self._delete_page, keys)))

    async def _delete_page(self, key: bytes) -> bool:
        try:
            async with self._writes, asyncio.timeout(STORE_TIMEOUT_S):
                if self._is_paused:
                    return False
                return await self._objects.delete(_name_of(key))
        except (ObjectStoreError, TimeoutError) as error:
            self._fail(error, f"removing a page took longer than {STORE_TIMEOUT_S:g} s")
            return False
        finally:
            self._being_removed.discard(key)

    async def _transfer(
        self, steps: Sequence[Coroutine[Any, Any, bool]], what_is_late: str, limit_s: float | None = None
    ) -> int:
        """Takes steps beside each other; returns how many leading ones have succeeded.

        Args:
            steps: one for each page; each returns whether it has succeeded.
            what_is_late: what the log says if time runs out.
            limit_s: limit of the time; the first step that does not succeed ends the others. None: all end, unless
                one raises.
        """
        tasks = [asyncio.create_task(step) for step in steps]
        n_pages = 0
        try:
            async with asyncio.timeout(limit_s):
                for task in tasks:
                    if not await task:
                        break
                    n_pages += 1
                if limit_s is None:
                    await asyncio.gather(*tasks)
        except (ObjectStoreError, TimeoutError) as error:
            self._fail(error, what_is_late)
        else:
            self._succeed()
        finally:  # from here on nobody writes to the buffers
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return n_pages

    def _note(self, keys: Sequence[bytes], n_removals: int) -> bool:
        """Notes that the store has pages, or a use of them. O(pages · log of the known ones).

        Args:
            keys: of the pages.
            n_removals: ``_n_removals`` when they were asked for.

        Returns:
            Whether that is still the number. If not, nothing is noted: they may have been removed meanwhile.
        """
        tick = time.time_ns()
        with self._lock:
            if n_removals != self._n_removals:
                return False
            for key in keys:
                if key in self._index:
                    self._index.touch(key, tick)
                else:
                    self._index.add(IndexedPage(key, self.page_bytes, tick))
            while len(self._index) > self._max_known_pages and (page := self._index.first_to_go()) is not None:
                self._index.remove(page.key)
                self._note_removed((page,))
        return True

    def _fail(self, error: ObjectStoreError | TimeoutError, what_is_late: str) -> None:
        """Counts a failure, and begins a pause. Warns if it is the first one since the store has answered."""
        self._n_failures += 1
        self._resumes = self._clock() + PAUSE_S
        with self._lock:
            self._take_all()
        if not self._is_away:
            self._is_away = True
            reason = what_is_late if isinstance(error, TimeoutError) else error
            logger.warning(
                "%s is away, so prompts are computed; it is tried again every %g s: %s", self._name, PAUSE_S, reason
            )

    def _succeed(self) -> None:
        if self._is_away and not self._is_paused:
            self._is_away = False
            logger.info("%s is back", self._name)


def _name_of(key: bytes) -> str:
    """Returns the name of a page's object."""
    return key[:DIGEST_BYTES].hex()
