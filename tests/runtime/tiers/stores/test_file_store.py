"""A store of files against a dict, over restarts and damage; its bound, its order, and its removals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.page_file import PageFormat
from radixkv.runtime.tiers.stores.page_store import PageCounts
from support.cases import examples
from support.page_files import (
    PAGE_TOKEN_BYTES,
    START,
    TIMEOUT_S,
    buffers,
    file_of,
    file_store,
    keys_of,
    load_run,
    page_files,
    page_of,
    store_run,
    tokens_of,
    wait,
    wait_for,
)

RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
FILE_BYTES = 8192
"""Bytes on disk of a page of 4096 bytes or less."""


class StoreMachine(RuleBasedStateMachine):
    """A store beside a dict of the contents that were stored. The store may have fewer pages, but no other ones."""

    page_bytes = 512
    max_pages = 1000

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp()) / "pages"
        self.pages: dict[bytes, bytes] = {}
        self.believed: set[bytes] = set()
        """Keys that the store has by what it has reported."""
        self.version = 0
        self.store = self.open()
        assert self.store.take_removed() == []

    def open(self) -> FileStore:
        return FileStore(
            self.path,
            page_bytes=self.page_bytes,
            page_token_bytes=PAGE_TOKEN_BYTES,
            max_bytes=self.max_pages * FILE_BYTES,
        )

    @property
    def may_evict(self) -> bool:
        return self.max_pages < 100

    @rule(run=RUNS)
    def store_pages(self, run: Sequence[int]) -> None:
        self.version += 1
        present = [key in self.pages for key in keys_of(run)]
        assert store_run(self.store, run, self.version % 256) == len(run) or self.may_evict
        for key in keys_of(run):
            self.pages.setdefault(key, page_of(key, self.page_bytes, self.version % 256))
        self.believed.update(key for key in keys_of(run) if self.store.run((key,)))
        if self.may_evict:  # a page that was evicted is stored again with the new contents
            self.forget_what_is_gone(run, present)

    def forget_what_is_gone(self, run: Sequence[int], present: Sequence[bool]) -> None:
        """Takes over the contents of the pages of a run that were written anew."""
        new = {key: page_of(key, self.page_bytes, self.version % 256) for key in keys_of(run)}
        loaded = load_run(self.store, run)
        for key, page, was_present in zip(keys_of(run), loaded, present, strict=False):
            assert page == new[key] or (was_present and page == self.pages[key])
            self.pages[key] = page

    @rule(run=RUNS)
    def load_pages(self, run: Sequence[int]) -> None:
        keys = keys_of(run)
        n_present = self.store.run(keys)
        expected = [self.pages[key] for key in keys[:n_present]]
        assert load_run(self.store, run) == expected
        if not self.may_evict:
            assert n_present == next((n for n, key in enumerate(keys) if key not in self.pages), len(keys))

    @rule(run=RUNS, with_leading=st.booleans())
    def remove_pages(self, run: Sequence[int], with_leading: bool) -> None:
        *leading, key = keys_of(run)
        n_before = self.store.n_pages
        removal = self.store.remove(key, leading if with_leading else ())
        assert removal.n_pages == n_before - self.store.n_pages
        assert wait(self.store, removal.ticket).n_pages == removal.n_pages
        below = {key[:32]}
        for _ in range(5):
            below |= {other[:32] for other in self.pages if other[32:] in below}
        self.pages = {other: page for other, page in self.pages.items() if other[:32] not in below}
        if with_leading and not self.may_evict:
            while leading and not any(other[32:] == leading[-1][:32] for other in self.pages):
                self.pages.pop(leading.pop(), None)
            assert all(self.store.run([other]) for other in self.pages)

    @rule()
    def clear(self) -> None:
        wait(self.store, self.store.clear())
        self.pages.clear()
        assert not page_files(self.path)

    @rule()
    def restart(self) -> None:
        self.store.close(TIMEOUT_S)
        self.store = self.open()
        assert self.store.take_removed() == []

    @invariant()
    def what_leaves_the_store_is_reported(self) -> None:
        for key in self.store.take_removed():
            if not self.store.run((key,)):
                self.believed.discard(key)
        assert all(self.store.run((key,)) for key in self.believed)

    @rule(run=RUNS, at=st.integers(-600, 600), is_cut=st.booleans())
    @precondition(lambda self: not self.may_evict)
    def damage(self, run: Sequence[int], at: int, is_cut: bool) -> None:
        file, key = file_of(self.path, run), keys_of(run)[-1]
        if key not in self.pages:
            return
        contents = bytearray(file.read_bytes())
        at %= len(contents)
        if is_cut:
            del contents[at:]
        else:
            contents[at] ^= 1
        file.write_bytes(contents)
        assert len(load_run(self.store, run)) < len(run)
        assert not file.exists()
        del self.pages[key]
        assert self.store.n_pages == len(self.pages)

    def teardown(self) -> None:
        n_bytes = sum(FILE_BYTES for _ in page_files(self.path))
        assert self.store.n_bytes == n_bytes <= self.max_pages * FILE_BYTES
        assert self.store.n_pages == len(page_files(self.path))
        self.store.close(TIMEOUT_S)
        shutil.rmtree(self.path.parent)


class SmallStoreMachine(StoreMachine):
    """The same where seldom more than a run fits."""

    page_bytes = 4096
    max_pages = 6


TestStore = StoreMachine.TestCase
TestStore.settings = examples(25, stateful_step_count=30)
TestSmallStore = SmallStoreMachine.TestCase
TestSmallStore.settings = examples(25, stateful_step_count=30)


@pytest.mark.parametrize("page_bytes", [1, 1000, 4096, 20480, 2**21])
@pytest.mark.parametrize("offset", [0, 8])
def test_any_size_and_alignment(tmp_path: Path, page_bytes: int, offset: int) -> None:
    keys, tokens = keys_of(range(5)), tokens_of(range(5))
    memory = memoryview(bytearray(offset + 5 * page_bytes))[offset:]
    slots = [memory[index * page_bytes : (index + 1) * page_bytes] for index in range(5)]
    with file_store(tmp_path / "pages", page_bytes=page_bytes) as store:
        assert store_run(store, range(5)) == 5
        assert wait(store, store.load(keys, tokens, slots)).n_pages == 5
        assert [bytes(slot) for slot in slots] == [page_of(key, page_bytes) for key in keys]
        assert wait(store, store.clear()).n_pages == 5
        assert wait(store, store.store(keys, tokens, slots)).n_pages == 5
        assert load_run(store, range(5)) == [page_of(key, page_bytes) for key in keys]


def test_large_pages_of_tokens(tmp_path: Path) -> None:
    tokens = bytes(range(256)) * 64
    store = FileStore(tmp_path / "pages", page_bytes=64, page_token_bytes=len(tokens), max_bytes=10**6)
    (slot,) = buffers(1, 64)
    slot[:] = page_of(START, 64)
    assert wait(store, store.store([START], tokens, [slot])).n_pages == 1
    slot[:] = bytes(64)
    assert wait(store, store.load([START], tokens, [slot])).n_pages == 1
    assert slot == page_of(START, 64)
    store.close(TIMEOUT_S)


def test_transfers_of_nothing_finish(tmp_path: Path) -> None:
    with file_store(tmp_path / "pages") as store:
        assert store.run([]) == wait(store, store.load([], b"", [])).n_pages == 0
        assert wait(store, store.store([], b"", [])).n_pages == wait(store, store.clear()).n_pages == 0


def test_the_end_of_the_least_recently_used_run_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with file_store(path, max_bytes=7 * FILE_BYTES) as store:
        store_run(store, [0, 1, 2])
        store_run(store, [0, 3, 4])
        assert len(load_run(store, [0, 1, 2])) == 3
        assert store_run(store, [5, 6, 7]) == 3
        assert store.run(keys_of([0, 3, 4])) == 2
        assert len(load_run(store, [0, 3])) == 2
        assert len(load_run(store, [0, 1, 2])) == 3
    with file_store(path, max_bytes=7 * FILE_BYTES) as store:
        assert store_run(store, [8, 9]) == 2
        assert [store.run(keys_of(run)) for run in ([0, 3], [5, 6, 7], [0, 1, 2])] == [2, 1, 3]
        assert store_run(store, [8, 9, 10, 11]) == 4
        assert [store.run(keys_of(run)) for run in ([0, 3], [5, 6, 7], [0, 1, 2])] == [1, 0, 3]
    with file_store(path, max_bytes=4 * FILE_BYTES) as store:
        assert len(page_files(path)) == store.n_pages == 4, "a smaller bound holds from the start"


def test_what_waiting_prompts_need_goes_last(tmp_path: Path) -> None:
    with file_store(tmp_path / "pages", max_bytes=6 * FILE_BYTES) as store:
        store_run(store, [0, 1])
        store_run(store, [2, 3])
        store_run(store, [4, 5])
        store.spare([keys_of([0, 1])[-1], keys_of([2, 3])[-1]])
        assert store_run(store, [6, 7]) == 2
        assert [store.run(keys_of(run)) for run in ([0, 1], [2, 3], [4, 5])] == [2, 2, 0]
        store.spare([keys_of([2, 3])[-1]])
        assert store_run(store, [8, 9]) == 2
        assert [store.run(keys_of(run)) for run in ([0, 1], [2, 3], [6, 7])] == [0, 2, 2]


def test_other_models_and_pages_of_other_sizes_count(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with file_store(path, page_bytes=2 * FILE_BYTES - 4096) as store:
        store_run(store, range(3))
        assert store.n_bytes == 6 * FILE_BYTES
    with file_store(path, max_bytes=6 * FILE_BYTES) as store:
        assert store_run(store, [5]) == 1
        assert (store.n_pages, store.n_bytes) == (3, 5 * FILE_BYTES)
        assert wait(store, store.clear()).n_pages == 3
        assert not page_files(path)


def test_loads_and_stores_at_once(tmp_path: Path) -> None:
    """Many transfers under way, of pages that are evicted meanwhile: each page that is loaded is right."""
    runs = [[first, *range(20)] for first in range(8)]
    with file_store(tmp_path / "pages", max_bytes=100 * FILE_BYTES) as store:
        for run in runs[:4]:
            store_run(store, run)
        n_loaded, loads, left = 0, {}, set[int]()
        for _ in range(6):
            for run in runs:
                slots = [buffers(len(run), 4096) for _ in range(2)]
                for key, slot in zip(keys_of(run), slots[0], strict=True):
                    slot[:] = page_of(key, 4096)
                left.add(store.store(keys_of(run), tokens_of(run), slots[0]))
                ticket = store.load(keys_of(run), tokens_of(run), slots[1])
                left.add(ticket)
                loads[ticket] = (run, slots[1])
        finished = wait_for(store, left)
        for ticket, (run, pages) in loads.items():
            n_loaded += finished[ticket]
            for key, page in zip(keys_of(run)[: finished[ticket]], pages, strict=False):
                assert page == page_of(key, 4096)
        assert n_loaded
        assert store.n_bytes == len(page_files(tmp_path / "pages")) * FILE_BYTES <= 100 * FILE_BYTES


def test_loads_go_before_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, queued = threading.Event(), threading.Event()
    write = PageFormat.write

    def write_late(self: PageFormat, *args: object) -> None:
        writing.set()
        assert queued.wait(TIMEOUT_S)
        write(self, *args)

    with file_store(tmp_path / "pages", n_threads=1) as store:
        store_run(store, range(4))
        monkeypatch.setattr(PageFormat, "write", write_late)
        stores = [store.store(keys_of([page]), tokens_of([page]), buffers(1, 4096)) for page in range(10, 20)]
        assert writing.wait(TIMEOUT_S)
        load = store.load(keys_of(range(4)), tokens_of(range(4)), buffers(4, 4096))
        queued.set()
        assert list(wait_for(store, [load, *stores])) == [stores[0], load, *stores[1:]], "the first store had begun"


def test_clear_drops_stores_that_have_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, cleared = threading.Event(), threading.Event()
    write = PageFormat.write

    def write_slowly(self: PageFormat, *args: object) -> None:
        writing.set()
        assert cleared.wait(TIMEOUT_S)
        write(self, *args)

    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, [9])
        monkeypatch.setattr(PageFormat, "write", write_slowly)
        ticket = store.store(keys_of(range(8)), tokens_of(range(8)), buffers(8, 4096))
        assert writing.wait(TIMEOUT_S)
        removal = store.clear()
        assert store.run(keys_of([9])) == 0
        cleared.set()
        assert wait_for(store, [ticket, removal]) == {ticket: 0, removal: 1}
        assert not page_files(path)
        assert store_run(store, range(8)) == 8


def test_pages_that_give_way_to_others_are_not_lost(tmp_path: Path) -> None:
    """A full folder is no broken one: what was evicted before its load began is a miss, and nothing more."""
    with file_store(tmp_path / "pages", max_bytes=6 * FILE_BYTES) as store:
        assert store_run(store, [1, 2, 3, 4]) == 4
        assert store_run(store, [5, 6, 7, 8]) == 4
        assert len(load_run(store, [1, 2, 3, 4])) == 2
        wait(store, store.remove(keys_of([5])[0]).ticket)
        assert load_run(store, [5, 6, 7, 8]) == []
        wait(store, store.clear())
        assert load_run(store, [1, 2]) == []
        assert store.counts == PageCounts(n_written=8)


def test_a_page_counts_once_for_each_file_that_is_written(tmp_path: Path) -> None:
    with file_store(tmp_path / "pages") as store:
        store_run(store, range(4))
        store_run(store, range(6))
        wait_for(store, [store.store(keys_of(range(9)), tokens_of(range(9)), buffers(9, 4096)) for _ in range(4)])
        assert store.counts == PageCounts(n_written=9)
    with file_store(tmp_path / "pages") as store:
        store_run(store, range(9))
        assert store.counts == PageCounts()


def test_close_keeps_what_was_to_be_stored(tmp_path: Path) -> None:
    with file_store(tmp_path / "pages") as store:
        for first in range(10):
            run = [first, *range(30)]
            store.store(keys_of(run), tokens_of(run), buffers(31, 4096))
    with file_store(tmp_path / "pages") as store:
        assert store.n_pages == 310


def test_close_returns_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    write = PageFormat.write

    def hang(self: PageFormat, *args: object) -> None:
        assert hanging.wait(TIMEOUT_S)
        write(self, *args)

    monkeypatch.setattr(PageFormat, "write", hang)
    monkeypatch.setattr("radixkv.runtime.tiers.stores.transfer_threads.LAST_STEP_S", 0.1)
    path, others = tmp_path / "pages", set(threading.enumerate())
    store = FileStore(path, page_bytes=4096, page_token_bytes=PAGE_TOKEN_BYTES, max_bytes=10**6)
    store.store(keys_of(range(20)), tokens_of(range(20)), buffers(20, 4096))
    store.close(0.1)  # with all threads in a page
    hanging.set()
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert 1 <= len(page_files(path)) <= 4, "the pages that threads were writing"
    assert all(os.path.getsize(file) == FILE_BYTES for file in page_files(path))


def test_stores_beyond_the_bound_of_the_queue_are_dropped(tmp_path: Path) -> None:
    with file_store(tmp_path / "pages", max_pending_bytes=10 * 4096) as store:
        assert store_run(store, range(25)) == 10
        assert store_run(store, range(25)) == 10, "the leading pages are there already"


def test_a_store_needs_no_torch() -> None:
    code = "import sys, radixkv.runtime.tiers.stores.file_store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
