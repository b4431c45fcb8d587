"""``segment_killer.py FOLDER SEED KILLS``: kills processes that share a segment, and reads the segment after each.

Run by a test. Three processes store, load and remove pages, and end with 3 if they read a wrong one. One of them is
killed at a random time, and another process then reads all pages and takes every slot. Nothing here imports torch,
and no process has a thread when it forks, so that 1,000 kills take a minute or two.

The checksum is switched off: a page must be right by locks and commit word alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from support.page_files import buffers, keys_of, page_of, tokens_of, wait
from support.segments import open_memory_store

PAGE_BYTES = 2**15
N_SLOTS = 40
"""Few enough that there is always something to evict."""
N_WORKERS = 3
N_BRANCHES, N_PAGES = 8, 9
RUNS = [[branch, *range(N_PAGES - 1)] for branch in range(N_BRANCHES)]
"""Together more than the bound."""
CONTENTS = {key: page_of(key, PAGE_BYTES) for run in RUNS for key in keys_of(run)}
WRONG_PAGE = 3


def open_unchecked(folder: Path) -> SharedMemoryStore:
    return open_memory_store(folder, N_SLOTS, PAGE_BYTES, is_checked=False)


def load_and_compare(store: SharedMemoryStore, run: list[int]) -> int:
    """Loads a run; ends the process if a page is wrong. Returns how many pages were read."""
    keys = keys_of(run)
    slots = buffers(len(run), PAGE_BYTES)
    n_pages = wait(store, store.load(keys, tokens_of(run), slots)).n_pages
    for key, slot in zip(keys[:n_pages], slots, strict=False):
        if bytes(slot) != CONTENTS[key]:
            print("a wrong page was read", flush=True)
            os._exit(WRONG_PAGE)
    return n_pages


def borrow_and_compare(store: SharedMemoryStore, run: list[int]) -> None:
    """Compares pages where they are, for a while in which others would overwrite them; ends the process if one is
    wrong."""
    keys = keys_of(run)
    slots = store.lend(keys, tokens_of(run), N_SLOTS)
    if slots is None:
        return
    memory, first, slot_bytes, _ = store.mapped_slots
    for _ in range(3):
        for key, slot in zip(keys, slots, strict=True):
            start = first + slot * slot_bytes
            if bytes(memory[start : start + PAGE_BYTES]) != CONTENTS[key]:
                print("a wrong page was lent", flush=True)
                os._exit(WRONG_PAGE)
        time.sleep(0.0005)
    store.give_back(keys, slots)


def work(folder: Path, random: Random) -> None:
    """Stores, loads and removes pages until it is killed, or its parent has died."""
    store, parent = open_unchecked(folder), os.getppid()
    while os.getppid() == parent:
        run = random.choice(RUNS)[: random.randint(1, N_PAGES)]
        keys = keys_of(run)
        if random.random() < 0.5:
            (load_and_compare if random.random() < 0.5 else borrow_and_compare)(store, run)
            continue
        if random.random() < 0.05:
            wait(store, store.remove(keys[-1], keys[:-1]).ticket)
        slots = buffers(len(run), PAGE_BYTES)
        for key, slot in zip(keys, slots, strict=True):
            slot[:] = CONTENTS[key]
        wait(store, store.store(keys, tokens_of(run), slots))


def check(folder: Path) -> int:
    """Reads all pages, and stores all runs while others do, too; returns how many pages were read."""
    store = open_unchecked(folder)
    assert store.n_bytes <= N_SLOTS * (PAGE_BYTES + 4096)
    return sum(load_and_compare(store, run) for run in RUNS)


def check_alone(folder: Path) -> None:
    """Takes every slot again: no lock is left, and no slot is lost."""
    store = open_unchecked(folder)
    run = list(range(1000, 1000 + N_SLOTS))
    slots = buffers(N_SLOTS, PAGE_BYTES)
    assert wait(store, store.store(keys_of(run), tokens_of(run), slots)).n_pages == N_SLOTS


def fork(function: Callable[..., object], *args: object) -> int:
    """Runs a function in a process of its own; returns the process."""
    if process := os.fork():
        return process
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def print_check(folder: Path) -> None:
    print("read", check(folder), flush=True)


def end_of(process: int) -> int:
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    folder, random, n_kills = Path(sys.argv[1]), Random(int(sys.argv[2])), int(sys.argv[3])
    workers = [fork(work, folder, Random(random.random())) for _ in range(N_WORKERS)]
    time.sleep(0.2)
    for _ in range(n_kills):
        time.sleep(random.random() * 0.02)
        victim = workers.pop(random.randrange(N_WORKERS))
        os.kill(victim, signal.SIGKILL)
        assert end_of(victim) == -signal.SIGKILL, "it had read a wrong page, or failed"
        workers.append(fork(work, folder, Random(random.random())))
        assert end_of(fork(print_check, folder)) == 0
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        assert end_of(worker) == -signal.SIGKILL
    assert end_of(fork(check_alone, folder)) == 0
    assert "torch" not in sys.modules
    print("done", flush=True)


if __name__ == "__main__":
    main()
