"""Slots that a store lends: nobody overwrites them until they are given back, or their borrower dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES
from radixkv.runtime.tiers.stores.page_value import KEY_AT
from radixkv.runtime.tiers.stores.shared_memory import memory_store as memory_store_module
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.slot_locks import SlotLocks
from radixkv.runtime.tiers.stores.shared_memory.slot_table import SlotTable
from radixkv.runtime.tiers.stores.transfer_threads import Urgency
from support.page_files import TIMEOUT_S, keys_of, load_run, page_of, store_run, tokens_of, wait
from support.segments import memory_store, open_memory_store

PAGE_BYTES = 5000
"""No multiple of the machine's pages."""
ALL = 1 << 20


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[SharedMemoryStore, SharedMemoryStore]]:
    """Two servers' stores in a segment of four slots."""
    with memory_store(tmp_path, 4, PAGE_BYTES) as one, memory_store(tmp_path, 4, PAGE_BYTES) as other:
        yield one, other


def lend(store: SharedMemoryStore, run: list[int], n_usable: int = ALL) -> list[int] | None:
    return store.lend(keys_of(run), tokens_of(run), n_usable)


def give_back(store: SharedMemoryStore, run: list[int], slots: list[int] | None) -> None:
    """Ends a loan, and waits until a thread has noted the use."""
    assert slots is not None
    store.give_back(keys_of(run), slots)
    give_up = time.monotonic() + TIMEOUT_S
    while True:
        with store._threads._wake:
            if not store._threads.n_waiting(Urgency.LOAD) and not store._threads._running:
                return
        assert time.monotonic() < give_up
        time.sleep(0.001)


def contents(store: SharedMemoryStore, slots: list[int] | None) -> list[bytes]:
    """Reads lent slots as a copier does."""
    assert slots is not None
    memory, first, slot_bytes, n_slots = store.mapped_slots
    assert first % 4096 == slot_bytes % 4096 == 0
    assert max(slots) < n_slots
    starts = [first + slot * slot_bytes for slot in slots]
    return [bytes(memory[start : start + PAGE_BYTES]) for start in starts]


def pages_of(run: list[int]) -> list[bytes]:
    return [page_of(key, PAGE_BYTES) for key in keys_of(run)]


def test_lent_pages_are_those_that_were_stored(stores: tuple[SharedMemoryStore, SharedMemoryStore]) -> None:
    one, other = stores
    assert store_run(one, [1, 2, 3]) == 3
    for store in stores:
        slots = lend(store, [1, 2, 3])
        assert contents(store, slots) == pages_of([1, 2, 3])
    assert lend(other, [1, 2, 3, 4]) is None, "one is not there"
    assert lend(other, [2]) is None


def test_nobody_takes_a_lent_slot(stores: tuple[SharedMemoryStore, SharedMemoryStore]) -> None:
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    slots = lend(other, [1, 2, 3, 4])
    for store in stores:
        assert store_run(store, [7]) == 0, "not even a thread of the borrower"
    assert contents(other, slots) == pages_of([1, 2, 3, 4])
    give_back(other, [1, 2, 3, 4], slots)
    assert store_run(one, [7]) == 1


def test_a_page_that_is_lent_twice_is_kept_until_both_are_given_back(
    stores: tuple[SharedMemoryStore, SharedMemoryStore],
) -> None:
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    loans = [lend(other, [1, 2, 3, 4]) for _ in range(2)]
    assert loans[0] == loans[1]
    for slots in loans:
        assert store_run(one, [7]) == 0
        give_back(other, [1, 2, 3, 4], slots)
    assert store_run(one, [7]) == 1


def test_others_read_and_borrow_what_is_lent(stores: tuple[SharedMemoryStore, SharedMemoryStore]) -> None:
    one, other = stores
    store_run(one, [1, 2])
    slots = lend(other, [1, 2])
    assert load_run(one, [1, 2]) == load_run(other, [1, 2]) == pages_of([1, 2])
    assert contents(one, lend(one, [1, 2])) == contents(other, slots)


def test_a_removal_takes_nothing_from_a_borrower(stores: tuple[SharedMemoryStore, SharedMemoryStore]) -> None:
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    slots = lend(other, [1, 2, 3, 4])
    wait(one, one.remove(keys_of([1])[0]).ticket)
    assert lend(other, [1]) is None
    assert store_run(one, [7]) == 0, "the slots are free and locked"
    assert contents(other, slots) == pages_of([1, 2, 3, 4])
    give_back(other, [1, 2, 3, 4], slots)
    assert store_run(one, [7]) == 1


def test_a_loan_that_is_refused_locks_nothing(
    stores: tuple[SharedMemoryStore, SharedMemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    assert lend(other, [1, 2, 3, 4], 3) is None, "the last slot is not pinned yet"
    monkeypatch.setattr(memory_store_module, "MAX_LENT_PAGES", 3)
    assert lend(other, [1, 2, 3, 4]) is None
    assert store_run(one, [5, 6, 7, 8]) == 4


def test_the_use_of_lent_pages_is_noted_by_a_thread_of_the_store(
    stores: tuple[SharedMemoryStore, SharedMemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for all pages before them, however long the prompt is."""
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    touch_chain, threads = SlotTable.touch_chain, list[str]()

    def noted(table: SlotTable, key: bytes, tick: int, n_most: int) -> int:
        threads.append(threading.current_thread().name)
        return touch_chain(table, key, tick, n_most)

    monkeypatch.setattr(SlotTable, "touch_chain", noted)
    slots = other.lend(keys_of([1, 2, 3, 4])[3:], tokens_of([1, 2, 3, 4])[-len(tokens_of([1])) :], ALL)
    assert slots is not None
    other.give_back(keys_of([1, 2, 3, 4])[3:], slots)
    give_back(other, [], [])
    assert len(threads) == 1
    assert threads[0].startswith("shared-memory")
    assert not other.take_finished(), "nobody waits for it"


def test_few_calls_unlock_a_loan(
    stores: tuple[SharedMemoryStore, SharedMemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    store_run(one, [1, 2, 3, 4])
    unlock, calls = SlotLocks.unlock, list[tuple[int, int | None]]()

    def counted(locks: SlotLocks, slot: int, last: int | None = None) -> None:
        calls.append((slot, last))
        unlock(locks, slot, last)

    monkeypatch.setattr(SlotLocks, "unlock", counted)
    give_back(other, [1, 2, 3, 4], lend(other, [1, 2, 3, 4]))
    assert calls == [(0, 3)]
    longer, shorter = lend(other, [1, 2, 3, 4]), lend(other, [1, 2])
    assert shorter is not None
    give_back(other, [1, 2, 3, 4], longer)
    assert len(calls) <= 1 + len(shorter) + 1
    monkeypatch.undo()
    store_run(one, [7, 8, 9])  # a thread may write the third one first, which then goes
    assert one.run(keys_of([7, 8, 9])) == 2, "the others are still lent"
    give_back(other, [1, 2], shorter)
    assert store_run(one, [5, 6]) == 2


@pytest.mark.parametrize("n_usable", [3, ALL])
def test_nothing_is_locked_before_all_slots_are_found(
    stores: tuple[SharedMemoryStore, SharedMemoryStore], monkeypatch: pytest.MonkeyPatch, n_usable: int
) -> None:
    """One slot is not usable, or one page is not there."""
    one, other = stores
    store_run(one, [1, 2, 3, 4] if n_usable == 3 else [1, 2, 3])
    locked = list[int]()
    monkeypatch.setattr(SlotLocks, "try_lock_shared", lambda locks, slot: not locked.append(slot))
    assert lend(other, [1, 2, 3, 4], n_usable) is None
    assert not locked


@pytest.mark.parametrize("changes", ["the page", "the key", "the tokens"])
def test_a_slot_that_another_page_has_taken_is_not_lent(
    stores: tuple[SharedMemoryStore, SharedMemoryStore], monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    """Between the look at the table and the lock; or its header is not the page's."""
    one, other = stores
    store_run(one, [1])
    store_run(one, [2])
    find = SlotTable.find
    tokens = tokens_of([1])
    if changes == "the page":
        monkeypatch.setattr(SlotTable, "find", lambda table, key: find(table, keys_of([2])[0]))
    elif changes == "the key":
        slot = one._table.find(keys_of([1])[0])
        assert slot is not None
        with one._slots.value(slot, KEY_AT + KEY_BYTES) as header:
            header[-1] ^= 1
    else:
        tokens = tokens_of([3])
    assert other.lend(keys_of([1]), tokens, ALL) is None
    monkeypatch.undo()
    assert not other._lent
    assert store_run(one, [5, 6, 7, 8]) == 4, "it is not locked"


def test_a_use_of_lent_pages_spares_them(stores: tuple[SharedMemoryStore, SharedMemoryStore]) -> None:
    one, other = stores
    store_run(one, [1, 2])
    store_run(one, [3, 4])
    slots = lend(other, [1, 2])
    give_back(other, [1, 2], slots)
    assert store_run(one, [8, 9]) == 2
    assert one.run(keys_of([1, 2])) == 2
    assert one.run(keys_of([3, 4])) == 0


def test_a_borrower_that_is_killed_gives_back(tmp_path: Path) -> None:
    with memory_store(tmp_path, 4, PAGE_BYTES) as store:
        store_run(store, [1, 2, 3, 4])
        has_lent, go = os.pipe()
        process = os.fork()
        if not process:
            borrower = open_memory_store(tmp_path, 4, PAGE_BYTES)
            is_lent = lend(borrower, [1, 2, 3, 4]) is not None
            os.write(go, bytes([is_lent]))
            signal.pause()
            os._exit(0)
        assert os.read(has_lent, 1) == b"\1"
        assert store_run(store, [7]) == 0
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert store_run(store, [7]) == 1
        assert load_run(store, [7]) == pages_of([7])
        os.close(has_lent)
        os.close(go)


def test_a_borrower_keeps_the_memory_of_a_store_that_is_closed(tmp_path: Path) -> None:
    store = open_memory_store(tmp_path, 4, PAGE_BYTES)
    store_run(store, [1])
    slots = lend(store, [1])
    mapped = store.mapped_slots
    store.close(1.0)
    assert slots is not None
    start = mapped.first + slots[0] * mapped.slot_bytes
    assert bytes(mapped.memory[start : start + PAGE_BYTES]) == pages_of([1])[0]
    with memory_store(tmp_path, 4, PAGE_BYTES) as other:
        assert store_run(other, [5, 6, 7, 8]) == 4, "its locks are free"
