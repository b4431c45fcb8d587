"""Host memory for pages of a GPU's pool, with the copies in both directions."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.copy_threads import count_slots
from radixkv.runtime.device.driver_cuda import CudaDriver
from radixkv.runtime.device.kv_pool_cuda import CudaPool
from radixkv.runtime.device.machine_cuda import local_cpus
from radixkv.runtime.device.ops.cuda.page_copies import gather_pages, scatter_pages
from radixkv.runtime.device.pinned_memory import PinnedMemory

_PIECE_BYTES = 1 << 30
"""Bytes that are pinned at a time."""
_STAGING_BYTES = 8 << 20
"""Size of a staging buffer on the GPU; there are four."""


class CudaHostSlots:
    """A ``copy_threads.HostSlots`` in pinned memory. A slot has K of all layers, then V of all layers.

    A copy goes through a contiguous staging buffer on the GPU: a kernel copies a page's parts between pool and
    buffer, and the GPU's copy engine moves the buffer. Loads and stores have streams and buffers of their own.

    Args:
        pool: whose pages are copied.
        n_bytes: size of the host memory, rounded down to whole slots.

    Raises:
        ConfigError: ``n_bytes`` is less than a page, or more than can be allocated.
    """

    def __init__(self, pool: CudaPool, n_bytes: int) -> None:
        self._page_bytes = pool.page_bytes
        self._n_slots = count_slots(n_bytes, pool.page_bytes)
        driver = CudaDriver()
        # No slot lies in two pieces, and no page of the machine does.
        unit = math.lcm(pool.page_bytes, mmap.PAGESIZE)
        piece_bytes = max(1, _PIECE_BYTES // unit) * unit
        device = pool.k.device
        self._memory = PinnedMemory(
            self._n_slots * pool.page_bytes,
            piece_bytes,
            pin=partial(_pin, device),
            unpin=_unpin,
            cpus=local_cpus(driver.bus_id(device)),
        )
        n_slots_a_piece = piece_bytes // pool.page_bytes
        self._loads, self._stores = (
            _StagedCopies(pool, self._memory.address, n_slots_a_piece, driver) for _ in range(2)
        )

    @property
    def n_slots(self) -> int:
        """Slots in all."""
        return self._n_slots

    @property
    def n_usable(self) -> int:
        """Leading slots whose memory is pinned; grows up to ``n_slots``."""
        return self._memory.n_ready_bytes // self._page_bytes

    @property
    def page_bytes(self) -> int:
        """Size of a slot in bytes."""
        return self._page_bytes

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a usable slot. O(1)."""
        first = slot * self._page_bytes
        return self._memory.view[first : first + self._page_bytes]

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages; returns when the device has the data. Raises ``DeviceError`` or torch's errors."""
        self._loads.load(_array(slots), pages)

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots; returns when the host has the data. Raises ``DeviceError`` or torch's errors."""
        self._stores.store(pages, _array(slots))

    def close(self) -> None:
        """Frees the memory; waits for the piece of it that is being pinned."""
        self._memory.close()


class _StagedCopies:
    """The copies of one direction through two staging buffers: while a kernel uses one, DMA uses the other.

    Args:
        pool: whose pages are copied.
        address: of the first slot.
        n_slots_a_piece: slots in each separately pinned piece.
        driver: copies between staging buffer and slots.
    """

    def __init__(self, pool: CudaPool, address: int, n_slots_a_piece: int, driver: CudaDriver) -> None:
        self._k, self._v = (cache.view(torch.int64).flatten(2) for cache in (pool.k, pool.v))
        self._address = address
        self._page_bytes = pool.page_bytes
        self._n_slots_a_piece = n_slots_a_piece
        self._driver = driver
        device = pool.k.device
        self._n_staged = max(1, _STAGING_BYTES // pool.page_bytes)
        # With priority, the short kernels start between the blocks of a step's long ones; else a copy beside a
        # prompt's step takes several times as long.
        self._kernels, self._dma = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._buffers = [_StagingBuffer(self._n_staged * pool.page_bytes, device) for _ in range(2)]
        self._done = torch.cuda.Event(blocking=True)
        self._compile(pool.zero_page)

    def load(self, slots: NDArray[np.int64], pages: Sequence[int]) -> None:
        """Copies slots to pages, and waits."""
        try:
            indices = self._to_device(pages)
            for some, buffer in self._turns(len(slots)):
                self._copy_slots(slots[some], buffer, is_load=True)
                buffer.filled.record(self._dma)
                self._kernels.wait_event(buffer.filled)
                with torch.cuda.stream(self._kernels):
                    scatter_pages(self._k, self._v, indices[some], buffer.memory)
                buffer.free.record(self._kernels)
        finally:
            self._wait()

    def store(self, pages: Sequence[int], slots: NDArray[np.int64]) -> None:
        """Copies pages to slots, and waits."""
        try:
            indices = self._to_device(pages)
            for some, buffer in self._turns(len(slots)):
                with torch.cuda.stream(self._kernels):
                    gather_pages(self._k, self._v, indices[some], buffer.memory)
                buffer.filled.record(self._kernels)
                self._dma.wait_event(buffer.filled)
                self._copy_slots(slots[some], buffer, is_load=False)
                buffer.free.record(self._dma)
        finally:
            self._wait()

    def _turns(self, n_slots: int) -> Iterator[tuple[slice, _StagingBuffer]]:
        """Yields the indices of each part that fits a buffer, and a buffer when it is free.

        So no more than two parts are enqueued: enqueueing to a full stream would wait with the interpreter's lock.
        """
        for first, buffer in zip(range(0, n_slots, self._n_staged), itertools.cycle(self._buffers), strict=False):
            buffer.free.synchronize()
            yield slice(first, first + self._n_staged), buffer

    def _to_device(self, pages: Sequence[int]) -> Tensor:
        # The driver takes few bytes of pageable memory at once: no pinned buffer has to outlive the call.
        with torch.cuda.stream(self._kernels):
            return torch.tensor(pages, dtype=torch.int32).to(self._k.device, non_blocking=True)

    def _copy_slots(self, slots: NDArray[np.int64], buffer: _StagingBuffer, *, is_load: bool) -> None:
        """Enqueues the DMA between slots and buffer, one copy for each run of consecutive slots of a piece."""
        is_first = np.ones(len(slots), np.bool_)
        is_first[1:] = (np.diff(slots) != 1) | (slots[1:] % self._n_slots_a_piece == 0)
        firsts = np.flatnonzero(is_first)
        on_host = self._address + slots[firsts] * self._page_bytes
        on_device = buffer.memory.data_ptr() + firsts * self._page_bytes
        n_bytes = np.diff(firsts, append=len(slots)) * self._page_bytes
        destinations, sources = (on_device, on_host) if is_load else (on_host, on_device)
        for destination, source, n in zip(destinations.tolist(), sources.tolist(), n_bytes.tolist(), strict=True):
            self._driver.copy(destination, source, n, self._dma)

    def _wait(self) -> None:
        for stream in (self._kernels, self._dma):
            self._done.record(stream)
            self._done.synchronize()

    def _compile(self, zero_page: int) -> None:
        """Compiles both kernels by copying the zero page onto itself, so that the first copy does not have to."""
        pages = self._to_device([zero_page])
        with torch.cuda.stream(self._kernels):
            gather_pages(self._k, self._v, pages, self._buffers[0].memory)
            scatter_pages(self._k, self._v, pages, self._buffers[0].memory)
        self._kernels.synchronize()


class _StagingBuffer:
    """Memory on the device, with the events of its two uses: waiting for ``free`` takes no processor time."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(n_bytes // 8, dtype=torch.int64, device=device)
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event(blocking=True)


def _array(slots: Sequence[int]) -> NDArray[np.int64]:
    return np.array(slots, np.int64)


def _pin(device: torch.device, address: int, n_bytes: int) -> None:
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = runtime.cudaHostRegister(address, n_bytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"the driver pins no more memory ({runtime.cudaGetErrorString(code)}; see ulimit -l)")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
