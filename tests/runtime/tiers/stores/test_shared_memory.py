"""Stores of two servers in one segment against a dict: what is found, what goes first, damage, and wrong uses."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.errors import ConfigError
from radixkv.runtime.device import memory_check
from radixkv.runtime.tiers.stores.page_keys import DIGEST_BYTES
from radixkv.runtime.tiers.stores.page_store import PageCounts
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from radixkv.runtime.tiers.stores.shared_memory.slot_table import ENTRY_BYTES, SlotTable
from support.cases import examples
from support.page_files import (
    PAGE_TOKEN_BYTES,
    START,
    TIMEOUT_S,
    buffers,
    keys_of,
    load_run,
    page_of,
    store_run,
    tokens_of,
    wait,
    wait_for,
)
from support.segments import memory_store, open_memory_store, segment_bytes, segment_url

RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
SERVERS = st.integers(0, 1)
PAGE_BYTES = 512


class MemoryMachine(RuleBasedStateMachine):
    """Two stores in one segment, beside a dict of the contents that were stored, from which some may be gone."""

    n_slots = 1000

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [open_memory_store(self.folder, self.n_slots) for _ in range(2)]
        self.pages: dict[bytes, bytes] = {}
        self.version = 0
        self.believed: list[set[bytes]] = [set(), set()]
        """Keys that each store has by what it has reported."""
        for store in self.stores:
            assert store.take_removed() == []

    @property
    def may_evict(self) -> bool:
        return self.n_slots < 100

    @rule(run=RUNS, server=SERVERS)
    def store_pages(self, run: Sequence[int], server: int) -> None:
        self.version = (self.version + 1) % 256
        keys = keys_of(run)
        had = {key for key in keys if self.stores[0].run((key,))}
        n_pages = store_run(self.stores[server], run, self.version)
        assert n_pages == len(run) or self.may_evict
        for key in keys:
            if key not in had:
                self.pages[key] = page_of(key, PAGE_BYTES, self.version)
            if self.stores[0].run((key,)):
                self.believed[server].add(key)

    @rule(run=RUNS, server=SERVERS)
    def load_pages(self, run: Sequence[int], server: int) -> None:
        keys = keys_of(run)
        n_present = self.stores[server].run(keys)
        assert n_present == self.stores[1 - server].run(keys)
        assert load_run(self.stores[server], run) == [self.pages[key] for key in keys[:n_present]]
        if not self.may_evict:
            assert n_present == next((n for n, key in enumerate(keys) if key not in self.pages), len(keys))

    @rule(run=RUNS, server=SERVERS, with_leading=st.booleans())
    def remove_pages(self, run: Sequence[int], server: int, with_leading: bool) -> None:
        *leading, key = keys_of(run)
        present = {other for other in self.pages if self.stores[0].run((other,))}
        removal = self.stores[server].remove(key, leading if with_leading else ())
        assert wait(self.stores[server], removal.ticket).n_pages == removal.n_pages
        below = {key[:32]}
        for _ in range(5):
            below |= {other[:32] for other in present if other[32:] in below}
        if not self.may_evict or all(other[32:] in below for other in present if other[:32] in below - {key[:32]}):
            left = {other for other in present if other[:32] not in below}
            while with_leading and leading and not any(other[32:] == leading[-1][:32] for other in left):
                left.discard(leading.pop())
            assert {other for other in self.pages if self.stores[0].run((other,))} == left
            assert removal.n_pages == len(present) - len(left)
        self.pages = {other: page for other, page in self.pages.items() if self.stores[0].run((other,))}

    @rule(server=SERVERS)
    def clear(self, server: int) -> None:
        """What servers share stays."""
        n_pages = self.stores[server].n_pages
        assert wait(self.stores[server], self.stores[server].clear()).n_pages == 0
        assert self.stores[server].n_pages == n_pages

    @rule(server=SERVERS)
    def restart(self, server: int) -> None:
        self.stores[server].close(TIMEOUT_S)
        self.stores[server] = open_memory_store(self.folder, self.n_slots)
        assert self.stores[server].take_removed() == []
        self.believed[server].clear()

    @invariant()
    def what_a_store_removes_it_reports(self) -> None:
        """What the other one removes it does not: so only one that removes alone is compared."""
        for server, store in enumerate(self.stores):
            self.believed[server].difference_update(store.take_removed())
        gone = {key for key in self.believed[0] | self.believed[1] if not self.stores[0].run((key,))}
        assert not gone & self.believed[0] & self.believed[1]

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.stores[0]._table.n_pages <= self.n_slots

    def teardown(self) -> None:
        for store in self.stores:
            store.close(TIMEOUT_S)
        shutil.rmtree(self.folder)


class FullMemoryMachine(MemoryMachine):
    n_slots = 7


TestMemory = MemoryMachine.TestCase
TestMemory.settings = examples(100, stateful_step_count=20, deadline=None)
TestFullMemory = FullMemoryMachine.TestCase
TestFullMemory.settings = examples(100, stateful_step_count=30, deadline=None)


def n_leading(store: SharedMemoryStore, run: Sequence[int]) -> int:
    return store.run(keys_of(run))


def test_the_least_recently_used_page_goes_first_and_ends_before_beginnings(tmp_path: Path) -> None:
    with memory_store(tmp_path, 6) as store:
        store_run(store, [1, 2, 3])
        store_run(store, [4, 5, 6])
        load_run(store, [1, 2, 3])
        for page, n_left in ((7, 2), (8, 1), (9, 0)):
            store_run(store, [page])
            assert n_leading(store, [4, 5, 6]) == n_left
        assert n_leading(store, [1, 2, 3]) == 3


def test_what_is_spared_goes_last(tmp_path: Path) -> None:
    with memory_store(tmp_path, 6) as store:
        store_run(store, [1, 2, 3])
        store_run(store, [4, 5])
        store_run(store, [6])
        store.spare([keys_of([1, 2, 3])[-1]])
        load_run(store, [4])
        store_run(store, [7])
        assert [n_leading(store, run) for run in ([1, 2, 3], [4, 5], [6])] == [3, 1, 1]
        load_run(store, [6])
        store.spare([keys_of([1, 2, 3])[-1], keys_of([4])[-1]])  # within a second: nothing is done
        store_run(store, [8])
        store_run(store, [9])
        assert [n_leading(store, run) for run in ([1, 2, 3], [4], [6])] == [1, 1, 1]


def test_a_question_is_no_use(tmp_path: Path) -> None:
    with memory_store(tmp_path, 6) as store:
        for page in range(6):
            store_run(store, [page])
        for page in range(3):
            assert store.has(*keys_of([page]))
            assert store.run(keys_of([page])) == 1
        for page in range(10, 13):
            store_run(store, [page])
        assert [n_leading(store, [page]) for page in range(6)] == [0, 0, 0, 1, 1, 1]


def test_pages_that_a_load_has_found_go_last_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_store(tmp_path, 6) as store:
        store_run(store, [1, 2, 3])
        store_run(store, [4, 5, 6])
        monkeypatch.setattr(store._threads, "start", lambda *arguments: 0)
        store.load(keys_of([1, 2, 3]), tokens_of([1, 2, 3]), buffers(3, PAGE_BYTES))
        monkeypatch.undo()
        for page in (7, 8, 9):
            store_run(store, [page])
        assert n_leading(store, [1, 2, 3]) == 3


def test_a_chat_that_grows_loses_its_end_first(tmp_path: Path) -> None:
    with memory_store(tmp_path, 64) as store:
        chat = list(range(20))
        store_run(store, chat[:10])
        store_run(store, [100])
        keys, tokens = keys_of(chat)[10:], tokens_of(chat[10:])
        assert wait(store, store.store(keys, tokens, buffers(10, PAGE_BYTES))).n_pages == 10
        for page in range(200, 254):
            store_run(store, [page])
        assert store._table.n_pages == 64
        assert n_leading(store, chat) == sum(store._table.find(key) is not None for key in keys_of(chat)) == 10


def test_a_load_of_the_end_keeps_the_beginning(tmp_path: Path) -> None:
    with memory_store(tmp_path, 64) as store:
        run = list(range(20))
        store_run(store, run)
        for page in range(100, 144):
            store_run(store, [page])
        keys, tokens = keys_of(run)[10:], tokens_of(run[10:])
        assert wait(store, store.load(keys, tokens, buffers(10, PAGE_BYTES))).n_pages == 10
        for page in range(200, 254):
            store_run(store, [page])
        assert n_leading(store, run) == sum(store._table.find(key) is not None for key in keys_of(run)) == 10


def test_two_servers_that_store_a_page_at_once_store_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_store(tmp_path, 6) as store, memory_store(tmp_path, 6) as other:
        begun, go_on = threading.Event(), threading.Event()
        copy_in = store._copy_in

        def wait_there(*args: Any) -> None:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
            copy_in(*args)

        monkeypatch.setattr(store, "_copy_in", wait_there)
        ticket = store.store(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
        assert begun.wait(TIMEOUT_S)
        assert store_run(other, [1, 2]) == 2
        go_on.set()
        assert wait(store, ticket).n_pages == 2
        assert store._table.n_pages == 2
        assert (store.counts.n_written, other.counts.n_written) == (0, 2)
        assert load_run(store, [1, 2]) == [page_of(key, PAGE_BYTES) for key in keys_of([1, 2])]
        assert store_run(store, [3, 4, 5, 6]) == 4


def test_a_sequence_longer_than_the_segment_keeps_its_beginning(tmp_path: Path) -> None:
    with memory_store(tmp_path, 6, n_threads=1) as store:  # two threads may end pages in another order
        store_run(store, [1, 2, 3])
        long = list(range(10, 20))
        assert store_run(store, long) == 6
        assert load_run(store, long) == [page_of(key, PAGE_BYTES) for key in keys_of(long)[:6]]


@pytest.mark.parametrize("clock", ["time_ns", "monotonic_ns"])
def test_a_clock_that_goes_back_costs_no_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    """The wall clock may be set; the other one begins anew when the machine restarts."""
    now = getattr(time, clock)
    monkeypatch.setattr(time, clock, lambda: now() + 3600 * 10**9)  # so that it stays above 0 on a new machine
    with memory_store(tmp_path, 6) as store:
        store_run(store, list(range(6)))
        monkeypatch.setattr(time, clock, now)
        assert load_run(store, [0, 1, 2]) == [page_of(key, PAGE_BYTES) for key in keys_of([0, 1, 2])]
        assert store_run(store, [10, 11, 12]) == 3
        assert [n_leading(store, run) for run in ([0, 1, 2], [10, 11, 12])] == [3, 3]
        for page in range(20, 26):
            store_run(store, [page])
        assert [n_leading(store, [page]) for page in range(20, 26)] == [1] * 6


def test_what_others_store_is_found_without_asking(tmp_path: Path) -> None:
    with memory_store(tmp_path) as store, memory_store(tmp_path) as other:
        assert other.n_pages == 0
        store_run(store, [1, 2])
        assert other.look_up(keys_of([1, 2])) is None
        assert other.n_pages == other.run(keys_of([1, 2])) == 2
        assert store_run(other, [1, 2, 3]) == 3
        assert (store.counts.n_written, other.counts.n_written) == (2, 1)
        assert other.health is not None
        assert not other.health.is_away


def test_a_damaged_page_is_a_miss_and_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checksum is behind the locks, for what no lock keeps out."""
    with memory_store(tmp_path) as store:
        assert store.take_removed() == []
        store_run(store, [1, 2])
        slot = store._table.find(keys_of([1, 2])[1])
        assert slot is not None
        with store._slots.value(slot, 4096 + PAGE_BYTES) as value:
            value[-1] ^= 1
        assert len(load_run(store, [1, 2])) == 1
        assert store.run(keys_of([1, 2])) == 1
        assert store.counts == PageCounts(n_written=2, n_lost=1)
        assert store.take_removed() == keys_of([1, 2])[1:]
        assert len(load_run(store, [1, 2])) == 1
        assert store.counts.n_lost == 1, "it was not there when this began"
        assert store_run(store, [1, 2]) == 2
        assert len(load_run(store, [1, 2])) == 2
    assert "is a miss, and is removed: its checksum is wrong" in caplog.text


def test_another_key_with_the_same_commit_word_is_a_miss(tmp_path: Path) -> None:
    with memory_store(tmp_path) as store:
        store_run(store, [1])
        (key,) = keys_of([1])
        like = key[:8] + bytes(56)
        assert store.run((like,)) == 1
        assert wait(store, store.load([like], tokens_of([1]), buffers(1, PAGE_BYTES))).n_pages == 0


def test_a_removal_drops_a_store_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_store(tmp_path) as store:
        begun, go_on = threading.Event(), threading.Event()
        first_to_go = SlotTable.first_to_go

        def wait_there(table: SlotTable, key: bytes, now: int) -> Iterator[tuple[int, int]]:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
            return first_to_go(table, key, now)

        monkeypatch.setattr(SlotTable, "first_to_go", wait_there)
        ticket = store.store(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
        assert begun.wait(TIMEOUT_S)
        removal = store.remove(START)
        go_on.set()
        assert wait_for(store, [ticket, removal.ticket]) == {ticket: 0, removal.ticket: 0}
        assert store.n_pages == 0


def test_a_word_across_two_entries_is_not_found(tmp_path: Path) -> None:
    with memory_store(tmp_path) as store:
        first, second = (bytes(range(start, start + 8)) for start in (1, 11))
        store._table.commit(0, first.ljust(64, b"\0"), 1)
        store._table.commit(1, second.ljust(64, b"\0"), 1)
        assert store._table.find(second) == 1
        assert store._table.find(first[4:] + second[:4]) is None


def test_a_removal_is_not_slower_for_each_page_before_it() -> None:
    n_slots, n_pages = 200_000, 2_000
    table = SlotTable(mmap.mmap(-1, n_slots * ENTRY_BYTES), 0, n_slots)
    digests = [number.to_bytes(DIGEST_BYTES, "little") for number in range(1, n_pages + 1)]
    keys = [digest + before for before, digest in pairwise([bytes(DIGEST_BYTES), *digests])]
    for slot, key in enumerate(keys):
        table.commit(slot, key, 1)
    for slot in range(n_pages, table.n_slots):
        table.commit(slot, (slot + 1).to_bytes(DIGEST_BYTES, "little") + b"other".ljust(DIGEST_BYTES, b"\0"), 1)

    def seconds(n_leading: int) -> float:
        began = time.perf_counter()
        assert table.below(keys[-1], keys[-1 - n_leading : -1]) == list(range(n_pages - 1 - n_leading, n_pages))
        return time.perf_counter() - began

    assert min(seconds(n_pages - 1) for _ in range(3)) < 4 * min(seconds(1) for _ in range(3))
    table.close()


def test_sets_hold_nearly_all_that_the_segment_has_room_for(tmp_path: Path) -> None:
    with memory_store(tmp_path, 1000) as store:
        assert store._table.n_slots >= 990
        run = list(range(900))
        assert store_run(store, run) >= 0
        assert 850 < store.n_pages <= 900


def test_most_pages_of_a_full_table_follow_an_unbroken_prefix() -> None:
    """Sets give up pages of the same age at different times; the fewer slots they have, the more prefixes break."""
    n_slots, n_pages = 4096, 100
    table = SlotTable(mmap.mmap(-1, n_slots * ENTRY_BYTES), 0, n_slots)
    runs = [keys_of([number, *range(n_pages - 1)]) for number in range(2 * n_slots // n_pages)]
    for now, run in enumerate(runs):
        for n, key in enumerate(run):
            _, slot = next(table.first_to_go(key, now * n_pages))
            table.clear(slot)
            table.commit(slot, key, (now + 1) * n_pages - n)
    assert table.n_pages == n_slots
    n_usable = sum(next((n for n, key in enumerate(run) if table.find(key) is None), n_pages) for run in runs)
    assert n_usable > 0.9 * n_slots
    table.close()


def test_closing_finishes_stores_and_leaves_no_thread_or_descriptor(tmp_path: Path) -> None:
    threads, n_open = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    store = open_memory_store(tmp_path)
    store.store(keys_of([1, 2]), tokens_of([1, 2]), buffers(2, PAGE_BYTES))
    store.close(TIMEOUT_S)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == n_open
    with memory_store(tmp_path) as store:
        assert store.n_pages == 2


URL_BYTES = segment_bytes(50, PAGE_BYTES)


def make_file(folder: Path, content: bytes = b"", mode: int = 0o600) -> Path:
    file = folder / f"radixkv-{os.getuid()}-kv"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def link(folder: Path) -> None:
    make_file(folder).rename(folder / "elsewhere")
    (folder / f"radixkv-{os.getuid()}-kv").symlink_to(folder / "elsewhere")


def patch_made(folder: Path, at: int, content: bytes) -> None:
    open_memory_store(folder).close(1.0)
    (file,) = folder.iterdir()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def cut(folder: Path) -> None:
    open_memory_store(folder).close(1.0)
    (file,) = folder.iterdir()
    os.truncate(file, URL_BYTES - 1)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (lambda folder: patch_made(folder, 15, b"0"), "another version of radixkv has made it"),
    "file": (lambda folder: make_file(folder, b"a" * 100), "is another file"),
    "mode": (lambda folder: make_file(folder, mode=0o640), "is open to other users"),
    "fifo": (lambda folder: os.mkfifo(folder / f"radixkv-{os.getuid()}-kv", 0o600), "is no file"),
    "folder": (lambda folder: (folder / f"radixkv-{os.getuid()}-kv").mkdir(), "Is a directory"),
    "link": (link, "Too many levels of symbolic links"),
    "size": (lambda folder: Segment(segment_url(folder, 1 << 20)).close(), "was made with 1048576 bytes"),
    "cut": (cut, "has cut the file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_segments_that_are_refused(tmp_path: Path, name: str) -> None:
    make, text = WRONG[name]
    make(tmp_path)
    with pytest.raises(ConfigError) as error:
        open_memory_store(tmp_path)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert f"shm://kv?size={URL_BYTES}"[:20] in str(error.value)


def test_a_segment_of_other_pages(tmp_path: Path) -> None:
    n_pages = 50
    with memory_store(tmp_path, n_pages):
        url = segment_url(tmp_path, URL_BYTES)
        with pytest.raises(
            ConfigError, match=r"it has pages of 512 bytes and 4 tokens, and those of this model have"
        ):
            Segment(url).map(1024, PAGE_TOKEN_BYTES)
        with pytest.raises(ConfigError, match=r"have 512 and 8; give another name, or remove the file /"):
            Segment(url).map(PAGE_BYTES, 2 * PAGE_TOKEN_BYTES)


def test_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    file.rename(tmp_path / "radixkv-4321-kv")
    with pytest.raises(ConfigError, match="is open to other users"):
        Segment(segment_url(tmp_path, 1 << 20))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(
        ConfigError, match=r"has no room for 1048576 bytes \([0-9]+ are free\); give a smaller size"
    ):
        Segment(segment_url(tmp_path, 1 << 20))
    assert not list(tmp_path.iterdir())


def test_less_memory_than_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1 << 19)
    with pytest.raises(ConfigError, match="does not fit into memory"):
        Segment(segment_url(tmp_path, 1 << 20))
    assert not list(tmp_path.iterdir())


def test_a_limit_of_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    segment = Segment(segment_url(tmp_path, 1 << 20))
    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        segment.map(PAGE_BYTES, PAGE_TOKEN_BYTES)


def test_too_small_a_segment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a size of 4096 bytes holds no page"):
        Segment(segment_url(tmp_path, 4096))
    segment = Segment(segment_url(tmp_path, 1 << 16))
    with pytest.raises(ConfigError, match="65536 bytes do not hold a page of 65536; give a larger size"):
        segment.map(1 << 16, PAGE_TOKEN_BYTES)
    segment.close()
    assert not list(tmp_path.iterdir())
    segment = Segment(segment_url(tmp_path, 1 << 18))
    segment.map(1 << 16, PAGE_TOKEN_BYTES)
    segment.close()


def test_pages_that_are_too_large_leave_a_segment_that_others_use(tmp_path: Path) -> None:
    with memory_store(tmp_path) as store:
        segment = Segment(segment_url(tmp_path, URL_BYTES))
        with pytest.raises(ConfigError, match="it has pages of 512 bytes"):
            segment.map(1 << 30, PAGE_TOKEN_BYTES)
        segment.close()
        with memory_store(tmp_path) as other:
            store_run(store, [1])
            assert other.run(keys_of([1])) == 1


def test_the_folder_is_unquoted_once(tmp_path: Path) -> None:
    for name, quoted in (("a+b", "a+b"), ("a b", "a%20b"), ("a%00", "a%2500"), ("a=b", "a=b")):
        (tmp_path / name).mkdir()
        Segment(f"shm://kv?size=1MiB&folder={tmp_path}/{quoted}").close()
        assert len(list((tmp_path / name).iterdir())) == 1


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give a folder in memory"):
        Segment(segment_url(tmp_path / "absent", 1 << 20))


def test_the_name_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Segment(f"shm://a.b-c?size=1MiB&folder={tmp_path}").close()
    (file,) = tmp_path.iterdir()
    assert file.name == f"radixkv-{os.getuid()}-a.b-c"
    about = file.stat()
    assert (about.st_size, about.st_blocks * 512 >= 1 << 20, about.st_mode & 0o777) == (1 << 20, True, 0o600)
