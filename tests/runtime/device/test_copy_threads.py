"""Threads that copy pages, at the end of a process that does not close them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading
import torch
from radixkv.runtime.device.memory.copy_threads import CopyThreads

class Slots:
    n_slots = n_usable = 1
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


def test_a_process_may_end_during_a_copy() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
