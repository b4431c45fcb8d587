"""Changes of a store in memory that another server writes, too."""

from __future__ import annotations

from pathlib import Path

from radixkv.runtime.tiers.storage_changes import N_CHECKED, StorageChanges
from radixkv.runtime.tiers.stores.page_keys import KeyChain
from radixkv.tree.changes import RemovedPages, StoredPages
from radixkv.tree.node import Namespace
from support.page_files import PAGE_TOKEN_BYTES, ROOT, keys_of, store_run, tokens_of
from support.segments import memory_store

N_SLOTS = 40


def test_what_another_server_evicts_is_reported(tmp_path: Path) -> None:
    with memory_store(tmp_path, N_SLOTS) as store, memory_store(tmp_path, N_SLOTS) as other:
        changes = StorageChanges(store, KeyChain(ROOT, PAGE_TOKEN_BYTES), PAGE_TOKEN_BYTES)
        changes.is_on = True
        assert changes.take() == []
        run = list(range(N_SLOTS))
        store_run(store, run)
        changes.add_stored(Namespace(), tokens_of(run))
        (stored,) = changes.take()
        assert isinstance(stored, StoredPages)
        store_run(other, list(range(100, 100 + N_SLOTS // 2)))
        removed = [change for _ in range(2 * N_SLOTS // N_CHECKED + 2) for change in changes.take()]
        gone = [digest for digest, key in zip(stored.digests, keys_of(run), strict=True) if not other.has(key)]
        assert len(gone) == N_SLOTS // 2
        assert {digest for change in removed for digest in change.digests} == set(gone)
        assert all(isinstance(change, RemovedPages) for change in removed)
        assert changes.n_pages == N_SLOTS // 2


def test_the_record_stays_bounded_while_another_server_evicts(tmp_path: Path) -> None:
    with memory_store(tmp_path, N_SLOTS) as store, memory_store(tmp_path, N_SLOTS) as other:
        changes = StorageChanges(store, KeyChain(ROOT, PAGE_TOKEN_BYTES), PAGE_TOKEN_BYTES)
        changes.is_on = True
        changes.take()
        for number in range(60):
            run = [number, *range(N_SLOTS // 2)]
            store_run(other, [1000 + number, *range(N_SLOTS - 1)])  # the other one evicts all
            store_run(store, run)
            store._removed = []  # what this store has evicted itself is not the subject
            changes.add_stored(Namespace(), tokens_of(run))
            changes.take()
            assert changes.n_pages <= 4 * N_SLOTS


def test_to_look_for_known_pages_is_no_use_of_them(tmp_path: Path) -> None:
    with memory_store(tmp_path, 6) as store:
        changes = StorageChanges(store, KeyChain(ROOT, PAGE_TOKEN_BYTES), PAGE_TOKEN_BYTES)
        changes.is_on = True
        store_run(store, [1, 2, 3])
        changes.add_stored(Namespace(), tokens_of([1, 2, 3]))
        store_run(store, [4, 5, 6])
        for _ in range(3):
            changes.take()
        store_run(store, [7])
        assert [store.has(key) for key in keys_of([1, 2, 3])] == [True, True, False]
