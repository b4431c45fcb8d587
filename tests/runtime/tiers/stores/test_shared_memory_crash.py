"""``kill -9`` of processes that share a segment, at random points and at each step: no wrong page, no slot lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.runtime.tiers.stores.shared_memory import memory_store as memory_store_module
from radixkv.runtime.tiers.stores.shared_memory import segment as segment_module
from radixkv.runtime.tiers.stores.shared_memory.segment import Segment
from radixkv.runtime.tiers.stores.shared_memory.slot_locks import SlotLocks
from radixkv.runtime.tiers.stores.shared_memory.slot_table import SlotTable
from support import segment_killer
from support.page_files import keys_of, load_run, page_of, store_run, tokens_of
from support.segments import memory_store, open_memory_store, segment_url

PAGE_BYTES = 2**14


@pytest.mark.parametrize("n_kills", [6, pytest.param(1000, marks=pytest.mark.nightly)])
def test_kill(tmp_path: Path, n_kills: int) -> None:
    command = [sys.executable, segment_killer.__file__, str(tmp_path), "1", str(n_kills)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    *read, last = done.stdout.splitlines()
    assert last == "done"
    assert len(read) == n_kills
    assert sum(int(line.removeprefix("read ")) > 10 for line in read) > n_kills / 2, "pages survive"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> None:
        die()

    return call


def after(function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)
        die()

    return call


def copy_half(function: Callable[..., object]) -> Callable[..., object]:
    def call(source: memoryview, target: memoryview) -> None:
        half = len(source) // 2
        function(source[:half], target[:half])
        die()

    return call


STEPS = {
    "before it takes the slot": (SlotTable, "clear", before),
    "once the slot is empty": (SlotTable, "clear", after),
    "before the page": (memory_store_module, "copy_page", before),
    "in the middle of the page": (memory_store_module, "copy_page", copy_half),
    "after the page": (memory_store_module, "copy_page", after),
    "before the commit word": (SlotTable, "commit", before),
    "after the commit word": (SlotTable, "commit", after),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_dies_at_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Its slot had another page, which is gone or not, and can be taken again at once."""
    keys = keys_of([1, 2, 3])
    with memory_store(tmp_path, 1, PAGE_BYTES) as store:
        store_run(store, [1])
    owner, name, change = STEPS[step]
    process = os.fork()
    if not process:
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
        dying = open_memory_store(tmp_path, 1, PAGE_BYTES, is_checked=False, n_threads=1)
        page = memoryview(page_of(keys[1], PAGE_BYTES))
        dying._write(dying._locks[0], keys[1], tokens_of([2]), page, time.monotonic_ns(), 0)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    monkeypatch.undo()
    store = open_memory_store(tmp_path, 1, PAGE_BYTES, is_checked=False)
    expected = {"before it takes the slot": [1], "after the commit word": [2]}.get(step)
    assert store.n_pages == bool(expected)
    for page in (1, 2):
        assert store.run((keys_of([1])[0] if page == 1 else keys[1],)) == (expected == [page])
    if expected == [1]:
        assert load_run(store, [1]) == [page_of(keys[0], PAGE_BYTES)]
    assert store_run(store, [7]) == 1
    assert load_run(store, [7]) == [page_of(*keys_of([7]), PAGE_BYTES)]
    store.close(1.0)


@pytest.mark.parametrize("step", ["posix_fallocate", "the size", "the magic"])
def test_a_maker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The next one makes the segment, also one of another size."""
    process = os.fork()
    if not process:
        if step == "posix_fallocate":
            monkeypatch.setattr(os, step, after(os.posix_fallocate))
        else:
            monkeypatch.setattr(os, "pwrite", {"the size": before, "the magic": after}[step](os.pwrite))
        Segment(segment_url(tmp_path, 1 << 22))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    with memory_store(tmp_path) as store:
        assert store_run(store, [1, 2]) == 2


def test_a_holder_that_is_stopped_keeps_nobody_waiting(tmp_path: Path) -> None:
    with memory_store(tmp_path, 1, PAGE_BYTES) as store:
        store_run(store, [1])
        process = os.fork()
        if not process:
            SlotLocks(store._segment.descriptor).try_lock_exclusive(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(process, os.WUNTRACED)
        assert load_run(store, [1]) == []
        assert store_run(store, [2]) == 0
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert load_run(store, [1]) == [page_of(*keys_of([1]), PAGE_BYTES)]
        assert store_run(store, [2]) == 1


def test_a_maker_that_is_stopped_ends_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_MAKING_S", 0.1)
    url = segment_url(tmp_path, 1 << 20)
    Segment(url).close()
    process = os.fork()
    if not process:
        segment = Segment(url)
        SlotLocks(segment.descriptor).try_lock_exclusive(segment_module.WHOLE_SEGMENT)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(process, os.WUNTRACED)
    try:
        with pytest.raises(segment_module.ConfigError, match="another server makes it, and does not go on"):
            Segment(url)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    Segment(url).close()


def test_servers_that_start_at_once_share_one_segment(tmp_path: Path) -> None:
    ready, go = os.pipe()
    processes = []
    for number in range(6):
        process = os.fork()
        if not process:
            os.close(go)
            os.read(ready, 1)  # ends when all have begun
            store = open_memory_store(tmp_path, 60, PAGE_BYTES)
            store_run(store, [number, number])
            store.close(10.0)
            os._exit(0)
        processes.append(process)
    os.close(go)
    for process in processes:
        assert os.waitpid(process, 0)[1] == 0
    os.close(ready)
    with memory_store(tmp_path, 60, PAGE_BYTES) as store:
        assert store.n_pages == 12
        for number in range(6):
            assert load_run(store, [number, number]) == [page_of(key, PAGE_BYTES) for key in keys_of([number] * 2)]


def test_the_file_may_lose_its_name(tmp_path: Path) -> None:
    """Servers that run go on; the next one makes another segment."""
    with memory_store(tmp_path) as store:
        (file,) = tmp_path.iterdir()
        file.unlink()
        assert store_run(store, [1]) == 1
        with memory_store(tmp_path) as other:
            assert other.n_pages == 0
            assert len(load_run(store, [1])) == 1
