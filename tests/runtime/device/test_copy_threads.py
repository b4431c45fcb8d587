"""Threads that copy pages: how they begin, and the end of a process that does not close them."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.runtime.device.memory.copy_threads import CopyThreads

SCRIPT = """
import threading
import torch
from radixkv.runtime.device.memory.copy_threads import CopyThreads

class Slots:
    n_slots = n_usable = 1
    is_growing = False
    page_bytes = 1 << 24

    def __init__(self):
        self.memory, self.pool = torch.zeros(1 << 22), torch.zeros(1 << 22)
        self.has_begun = threading.Event()

    def load(self, slots, pages):
        self.has_begun.set()
        for _ in range(50):
            self.pool.copy_(self.memory)

    store = load

slots = Slots()
copier = CopyThreads(slots)
for _ in range(100):
    copier.load([0], [0])
    copier.store([0], [0])
slots.has_begun.wait()
"""


@pytest.mark.nightly
def test_a_process_may_end_during_a_copy() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_each_thread_chooses_its_device_before_it_copies() -> None:
    """A thread of a rank begins with GPU 0."""
    begun: set[int] = set()
    copied: list[bool] = []

    def copy(*_: object) -> None:
        copied.append(threading.get_ident() in begun)

    slots: Any = SimpleNamespace(n_slots=1, n_usable=1, page_bytes=4096, load=copy, store=copy, close=lambda: None)
    copier = CopyThreads(slots, begin_thread=lambda: begun.add(threading.get_ident()))
    copier.load([0], [0])
    copier.store([0], [0])
    n_finished = 0
    while n_finished < 2:
        select.select([copier], [], [], 60.0)
        n_finished += len(copier.take_finished())
    copier.close()
    assert copied == [True, True]
    assert len(begun) == 2
