"""A file system that does not respond, or responds late: calls return, loads and stores end in time."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.runtime.tiers.stores import file_store as file_store_module
from radixkv.runtime.tiers.stores import transfer_threads
from radixkv.runtime.tiers.stores.file_store import N_THREADS, FileStore
from radixkv.runtime.tiers.stores.page_file import PageFormat
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer, PageCounts
from support.page_files import (
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
)

RUN = range(6)
STUCK_S = 0.5


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (transfer_threads, "STUCK_S"),
        (file_store_module, "STUCK_S"),
        (file_store_module, "LOAD_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, STUCK_S)


class Hang:
    """Calls that hang until they are let go."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self.n_hanging = 0

    def wait(self) -> None:
        self.n_hanging += 1
        assert self._is_over.wait(TIMEOUT_S)
        self.n_hanging -= 1

    def let_go(self) -> None:
        self._is_over.set()
        wait_until(lambda: not self.n_hanging)


@contextmanager
def hanging(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, which: Callable[..., bool] = lambda *_: True
) -> Iterator[Hang]:
    """Lets calls of a function hang whose arguments ``which`` accepts."""
    hang, function = Hang(), getattr(target, name)

    def call(*args: object, **settings: object) -> object:
        if which(*args):
            hang.wait()
        return function(*args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, call)
        try:
            yield hang
        finally:
            hang.let_go()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def finish(store: FileStore, ticket: int) -> FinishedTransfer:
    """Waits for a transfer as the loop does, which looks twice a second whether or not anything has finished."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (finished := store.take_finished()):
        assert time.monotonic() < deadline, "the transfer does not end"
        select.select([store.fileno()], [], [], STUCK_S / 4)
    assert [one.ticket for one in finished] == [ticket]
    return finished[0]


def begin_load(store: FileStore) -> tuple[int, list[memoryview]]:
    slots = buffers(len(RUN), 4096)
    return store.load(keys_of(RUN), tokens_of(RUN), slots), slots


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "socket"])
def test_what_is_no_regular_file_is_a_lost_page_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
        place = file_of(path, RUN[:4])
        if kind == "link":
            place.rename(tmp_path / "page")
            place.symlink_to(tmp_path / "page")
        else:
            place.unlink()
        if kind == "folder":
            place.mkdir()
        elif kind == "fifo":
            os.mkfifo(place)
        elif kind == "socket":
            os.mknod(place, 0o140600)
        assert load_run(store, RUN) == [page_of(key, 4096) for key in keys_of(RUN)[:3]]
        assert store.counts.n_lost == 1
        assert store.run(keys_of(RUN)) == 3
        if kind != "folder":
            assert store_run(store, RUN) == len(RUN)
            assert len(load_run(store, RUN)) == len(RUN)


def test_a_read_that_hangs_costs_its_page_and_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, pages = keys_of(RUN), [page_of(key, 4096) for key in keys_of(RUN)]
    with file_store(tmp_path / "pages") as store:
        store_run(store, RUN)
        with hanging(monkeypatch, PageFormat, "read", lambda *args: args[3] == keys[2]) as hang:
            ticket, slots = begin_load(store)
            assert finish(store, ticket).n_pages == 2
            assert [bytes(slot) for slot in slots[:2]] == pages[:2]
            assert store.run(keys) == 2, "nobody waits for this page again"
            assert load_run(store, RUN[:2]) == pages[:2], "the other threads go on"
            for slot in slots:
                slot[:] = bytes(4096)  # they are other pages' by now
            hang.let_go()
            wait_until(lambda: store.run(keys) == len(RUN))
            assert not any(map(any, slots))
        assert load_run(store, RUN) == pages
        assert store.counts == PageCounts(n_written=len(RUN)), "nothing is lost"
    assert len(caplog.records) == 1


def test_nothing_begins_while_all_threads_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
        with hanging(monkeypatch, PageFormat, "read") as hang:
            first, _ = begin_load(store)
            second = store.store(keys_of([9]), tokens_of([9]), buffers(1, 4096))
            ended = set[int]()
            deadline = time.monotonic() + TIMEOUT_S
            while len(ended) < 2:
                assert time.monotonic() < deadline
                ended |= {one.ticket for one in store.take_finished() if not one.n_pages}
                time.sleep(0.01)
            assert ended == {first, second}
            assert hang.n_hanging == N_THREADS
            assert load_run(store, RUN) == []
            assert store_run(store, [9]) == 0
        assert len(load_run(store, RUN)) == len(RUN)
        assert store_run(store, [9]) == 1
    assert len(page_files(path)) == len(RUN) + 1


@pytest.mark.parametrize("call", ["writev", "rename"])
def test_a_write_that_hangs_ends_and_leaves_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The slots are other pages' once the write has ended, so what was written from them then is of no use."""
    path = tmp_path / "pages"
    with file_store(path) as store:
        with hanging(monkeypatch, os, call):
            slots = buffers(len(RUN), 4096)
            for key, slot in zip(keys_of(RUN), slots, strict=True):
                slot[:] = page_of(key, 4096)
            assert finish(store, store.store(keys_of(RUN), tokens_of(RUN), slots)).n_pages == 0
            for slot in slots:
                slot[:] = bytes(4096)
        wait_until(lambda: store_run(store, [9]) == 1)
        n_there = store.run(keys_of(RUN))
        assert n_there == (0 if call == "writev" else n_there)
        assert load_run(store, RUN[:n_there]) == [page_of(key, 4096) for key in keys_of(RUN)[:n_there]]
        wait_until(lambda: store.n_bytes == len(page_files(path)) * 8192)  # a late rename is counted after it
        assert store_run(store, RUN) == len(RUN)


@pytest.mark.parametrize("name", ["unlink", "rename"])
def test_no_call_waits_for_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They belong to the thread that runs all requests."""
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
        store.take_removed()
        with hanging(monkeypatch, os, name) as hang:
            if name == "unlink":
                store.remove(keys_of(RUN)[5])
            else:
                store.store(keys_of([9]), tokens_of([9]), buffers(1, 4096))
            wait_until(lambda: hang.n_hanging)
            began = time.monotonic()
            store.remove(keys_of(RUN)[4])
            begin_load(store)
            store.store(keys_of([8]), tokens_of([8]), buffers(1, 4096))
            store.spare([keys_of(RUN)[3]])
            assert store.run(keys_of(RUN)) == 4
            assert set(store.take_removed()) >= {keys_of(RUN)[4]}
            store.clear()
            assert store.n_pages == 0
            assert time.monotonic() - began < TIMEOUT_S / 2
        wait_until(lambda: not page_files(path))
        while store.take_finished():
            pass
        assert store.n_bytes == 0


def test_a_load_of_a_slow_disk_ends_with_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PageFormat.read

    def read_slowly(*args: object) -> None:
        time.sleep(STUCK_S / 3)
        read(*args)

    with file_store(tmp_path / "pages") as store:
        store_run(store, range(40))
        monkeypatch.setattr(PageFormat, "read", read_slowly)
        monkeypatch.setattr(file_store_module, "LOAD_PAGE_S", 0.0)
        slots = buffers(40, 4096)
        n_pages = finish(store, store.load(keys_of(range(40)), tokens_of(range(40)), slots)).n_pages
        assert 0 < n_pages < 40
        assert [bytes(slot) for slot in slots[:n_pages]] == [page_of(key, 4096) for key in keys_of(range(n_pages))]
