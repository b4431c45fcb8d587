"""The runtime process, which at SIGUSR1 changes a bit of every page of its KV pool that is in use."""

from __future__ import annotations

import signal
import sys

import torch

from radixkv.runtime.device.cpu import executor as executor_cpu
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.process import main


class CorruptiblePool(KVPool):
    """A pool that changes its pages at a signal, which Python handles between two operations."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        signal.signal(signal.SIGUSR1, lambda *_: self.corrupt())

    def corrupt(self) -> None:
        """Flips a bit of the first value of V in the last layer of each page that was written."""
        first = self.v[-1, : self.n_pages, 0, 0, 0].view(torch.int32)
        first ^= (first != 0).int() << 20


if __name__ == "__main__":
    executor_cpu.KVPool = CorruptiblePool
    sys.exit(main())
