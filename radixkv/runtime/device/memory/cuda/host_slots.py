"""Host memory for pages of a GPU's pool, with the copies in both directions."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.machine import local_cpus
from radixkv.runtime.device.memory.copy_threads import count_slots
from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
from radixkv.runtime.device.memory.cuda.copy_stream import CopyStream
from radixkv.runtime.device.memory.cuda.driver import CudaDriver
from radixkv.runtime.device.memory.cuda.kv_pool import CopiedPool
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory
from radixkv.runtime.device.memory.registered_memory import RegisteredMemory
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.ops.cuda.page_copies import gather_pages, scatter_pages
from radixkv.runtime.step.page_copier import MappedSlots, SlotPart

_PIECE_BYTES = 1 << 30
"""Bytes that are pinned at a time."""
_NO_SLOT = 1 << 40
"""A number that no slot has."""
_STAGING_BYTES = 16 << 20
"""Size of a staging buffer on the GPU; there are four."""
_MAX_PARTS_ENQUEUED = 32
"""Parts of a copy, of a staging buffer each, that are enqueued before the host waits for them: enqueueing to a full
stream would wait with the interpreter's lock."""


class CudaHostSlots:
    """A ``copy_threads.HostSlots`` in pinned memory. A slot has K of all layers, then V of all layers.

    Where layers have heads of several shapes, a slot has this for the layers of each shape, one after the other.

    A copy goes through a contiguous staging buffer on the GPU: a kernel copies a page's parts between pool and
    buffer, and the GPU's copy engine moves the buffer. Loads and stores have two buffers each.

    With slabs, a window page takes the place of the slots of a slab, and is copied with the units of the slab that
    it does not use.

    Args:
        pool: whose pages are copied.
        n_bytes: size of the host memory, rounded down to whole slots.
        driver: copies between the GPU and the slots.
        pace: how fast copies go beside steps.
        part: of each slot; see ``Executor.open_copier``.
        state_slots: those of states of recurrent layers, at the beginning of the memory; None: there are none.
        slabs: the slabs of the pool, which window pages have; None: there are none.

    Raises:
        ConfigError: ``n_bytes`` is less than a page, or more than can be allocated.
    """

    def __init__(
        self,
        pool: CopiedPool,
        n_bytes: int,
        driver: CudaDriver,
        pace: CopyPace,
        part: SlotPart | None = None,
        state_slots: StateSlots | None = None,
        slabs: CopiedPool | None = None,
    ) -> None:
        n_parts, index = (1, 0) if part is None else (part.n_parts, part.index)
        self.page_bytes = n_parts * pool.page_bytes
        self._n_state_bytes = 0 if state_slots is None else state_slots.n_bytes
        self.n_slots = count_slots(n_bytes - self._n_state_bytes, self.page_bytes)
        self._is_storing = part is None or part.stores
        # No slot or slab lies in two pieces, and no page of the machine does. A state's slot is a number of pages'
        # bytes.
        whole = self.page_bytes if state_slots is None else state_slots.slot_bytes
        unit = math.lcm(whole if slabs is None else n_parts * slabs.page_bytes, mmap.PAGESIZE)
        piece_bytes = max(1, _PIECE_BYTES // unit) * unit
        self._device = device = pool.device
        self._mapped: RegisteredMemory | None = None
        self._memory = PinnedMemory(
            self._n_state_bytes + self.n_slots * self.page_bytes,
            piece_bytes,
            pin=partial(_pin, device),
            unpin=_unpin,
            cpus=local_cpus(driver.bus_id(device)),
            descriptor=None if part is None else part.memory,
        )
        places = _Places(
            address=self._memory.address + index * pool.page_bytes,
            slot_bytes=self.page_bytes,
            n_a_piece=piece_bytes // self.page_bytes,
            first=self._n_state_bytes // self.page_bytes,
        )
        largest = pool.page_bytes if slabs is None else slabs.page_bytes
        try:
            lanes = [_Lanes.of(max(1, _STAGING_BYTES // largest) * largest, pool.device) for _ in range(2)]
            self._loads, self._stores = (
                _StagedCopies(pool, places, driver, pace, some, are_loads=are_loads)
                for some, are_loads in zip(lanes, (True, False), strict=True)
            )
            self.windows = None
            if slabs is not None:
                slab_bytes = n_parts * slabs.page_bytes
                of_slabs = _Places(
                    address=self._memory.address + index * slabs.page_bytes,
                    slot_bytes=slab_bytes,
                    n_a_piece=piece_bytes // slab_bytes,
                    first=0,
                )
                self.windows = CudaHostWindows(
                    *(
                        _StagedCopies(slabs, of_slabs, driver, pace, some, are_loads=are_loads)
                        for some, are_loads in zip(lanes, (True, False), strict=True)
                    ),
                    is_storing=self._is_storing,
                )
        except BaseException:  # such as too little memory for the staging buffers
            self._memory.close()
            raise

    @property
    def n_usable(self) -> int:
        """Leading slots whose memory is pinned; grows up to ``n_slots`` once the states' memory is pinned."""
        return max(0, self._memory.n_ready_bytes - self._n_state_bytes) // self.page_bytes

    @property
    def is_growing(self) -> bool:
        """Whether memory is being pinned."""
        return self._memory.is_growing

    @property
    def n_mapped_slots(self) -> int:
        """See ``PageCopier.n_mapped_slots``. Grows as their memory is pinned."""
        return 0 if self._mapped is None else self._mapped.n_ready

    @property
    def memory(self) -> PinnedMemory:
        """All of the memory; its beginning belongs to states."""
        return self._memory

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a usable slot. O(1)."""
        first = self._n_state_bytes + slot * self.page_bytes
        return self._memory.view[first : first + self.page_bytes]

    def map_slots(self, mapped: MappedSlots) -> None:
        """See ``HostMemoryCopier.map_slots``. A thread pins the memory."""
        assert self._mapped is None, "slots are mapped once"
        self._mapped = RegisteredMemory(mapped, _PIECE_BYTES, pin=partial(_pin, self._device), unpin=_unpin)
        self._loads.mapped = _MappedPlaces(self.n_slots, self._mapped.address, mapped.slot_bytes)

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages; returns when the device has the data. Raises ``DeviceError`` or torch's errors."""
        self._loads.run(slots, pages)

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots; returns when the host has the data. Raises ``DeviceError`` or torch's errors."""
        if self._is_storing:
            self._stores.run(slots, pages)

    def close(self) -> None:
        """Frees the memory; waits for the piece of it that is being pinned."""
        if self._mapped is not None:
            self._mapped.close()
        self._memory.close()


class CudaHostWindows:
    """``copy_threads.StateCopies`` of the window pages of a pool in slabs, in the memory of its host slots.

    Args:
        loads, stores: copy slabs; the lanes are those of the host slots, which the same thread copies.
        is_storing: whether this rank stores, see ``SlotPart``.
    """

    def __init__(self, loads: _StagedCopies, stores: _StagedCopies, *, is_storing: bool) -> None:
        self._loads, self._stores, self._is_storing = loads, stores, is_storing

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies window pages from the host (source, destination). Raises ``DeviceError`` or torch's errors."""
        self._loads.run([slab for slab, _ in states], [page for _, page in states])

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """Copies window pages to the host (destination, source). Raises ``DeviceError`` or torch's errors."""
        if self._is_storing:
            self._stores.run([slab for slab, _ in states], [page for _, page in states])


class _Places(NamedTuple):
    """Where the slots are in host memory, counted from its beginning."""

    address: int
    """Of the part of the very first slot that is copied, of the size of a page."""
    slot_bytes: int
    """Size of a slot."""
    n_a_piece: int
    """Slots in each separately pinned piece."""
    first: int
    """Place of the first slot for a page; those before it are memory of states."""


class _MappedPlaces(NamedTuple):
    """Where slots are that another object has mapped."""

    first_slot: int
    """Number of the first one."""
    address: int
    """Of its page."""
    slot_bytes: int
    """From one page to the next one, with what lies between them."""


class _StagedCopies:
    """The copies of one direction, part by part, through two lanes in turn.

    Args:
        pool: whose pages are copied.
        places: where the slots are.
        driver: copies between staging buffer and slots.
        pace: how fast copies go beside steps.
        lanes: their buffers have room for a page or more.
        are_loads: whether slots are copied to pages, not pages to slots.
    """

    def __init__(
        self,
        pool: CopiedPool,
        places: _Places,
        driver: CudaDriver,
        pace: CopyPace,
        lanes: _Lanes,
        *,
        are_loads: bool,
    ) -> None:
        self._are_loads = are_loads
        self._caches = [[cache.view(torch.int64).flatten(2) for cache in part] for part in pool.parts]
        sizes = [2 * k.shape[0] * k.shape[2] for k, _ in self._caches]
        self._firsts = [sum(sizes[:part]) for part in range(len(sizes))]
        """[parts]: index of each part's first element in the block of a page."""
        self._places = places
        self.mapped = _MappedPlaces(_NO_SLOT, 0, 0)
        """Further slots; none at first."""
        self._page_bytes = pool.page_bytes
        self._driver = driver
        self._pace = pace
        self._lanes = lanes
        self._n_staged = lanes.first.buffer.nbytes // pool.page_bytes
        self._compile(pool.zero_page)

    def run(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies between slots and pages, and waits."""
        numbers, indices = np.array(slots, np.int64), np.array(pages, np.int32)
        try:
            for part, first in enumerate(range(0, len(numbers), self._n_staged)):
                lane, some = self._lanes[part % 2], slice(first, first + self._n_staged)
                if part and part % _MAX_PARTS_ENQUEUED == 0:
                    lane.copies.wait()
                self._pace.wait(len(numbers[some]) * self._page_bytes)
                self._copy_part(lane, numbers[some], indices[some])
        finally:
            for lane in self._lanes:
                lane.copies.wait()

    def _copy_part(self, lane: _Lane, slots: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
        """Enqueues the copy of at most as many pages as a lane's buffer holds."""
        with torch.cuda.stream(lane.copies.stream):
            # The driver takes few bytes of pageable memory at once: no pinned buffer has to outlive the call.
            indices = torch.from_numpy(pages).to(lane.buffer.device, non_blocking=True)
            if self._are_loads:
                self._move_slots(lane, slots)
                self._copy_blocks(scatter_pages, lane, indices)
            else:
                self._copy_blocks(gather_pages, lane, indices)
                self._move_slots(lane, slots)

    def _move_slots(self, lane: _Lane, slots: NDArray[np.int64]) -> None:
        """Enqueues the DMA between slots and buffer, a copy for each run of consecutive whole slots of a piece."""
        places, is_mapped = self._places.first + slots, slots >= self.mapped.first_slot
        is_first, slot_bytes = np.ones(len(places), np.bool_), self._places.slot_bytes
        if slot_bytes == self._page_bytes:
            is_first[1:] = (np.diff(places) != 1) | (places[1:] % self._places.n_a_piece == 0) | is_mapped[1:]
        firsts = np.flatnonzero(is_first)
        on_host = np.where(
            is_mapped[firsts],
            self.mapped.address + (slots[firsts] - self.mapped.first_slot) * self.mapped.slot_bytes,
            self._places.address + places[firsts] * slot_bytes,
        )
        on_device = lane.buffer.data_ptr() + firsts * self._page_bytes
        n_bytes = np.diff(firsts, append=len(places)) * self._page_bytes
        destinations, sources = (on_device, on_host) if self._are_loads else (on_host, on_device)
        self._driver.copy(destinations, sources, n_bytes, lane.copies.stream)

    def _copy_blocks(self, copy: Callable[..., None], lane: _Lane, pages: Tensor) -> None:
        """Enqueues the copy between the pool and the blocks of pages in a lane's buffer, part by part."""
        for (k, v), first in zip(self._caches, self._firsts, strict=True):
            copy(k, v, pages, lane.buffer[first:], self._page_bytes // 8)

    def _compile(self, zero_page: int) -> None:
        """Compiles both kernels by copying the zero page onto itself, so that the first copy does not have to."""
        lane = self._lanes[0]
        with torch.cuda.stream(lane.copies.stream):
            pages = torch.tensor([zero_page], dtype=torch.int32, device=lane.buffer.device)
            self._copy_blocks(gather_pages, lane, pages)
            self._copy_blocks(scatter_pages, lane, pages)
        lane.copies.wait()


class _Lane:
    """A stream and the staging buffer of its parts: DMA works for one lane while the other's kernel runs.

    The lanes' parts are different pages and slots, so nothing orders one lane after the other.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.copies = CopyStream(device)
        self.buffer = torch.empty(n_bytes // 8, dtype=torch.int64, device=device)


class _Lanes(NamedTuple):
    """The two lanes of one direction."""

    first: _Lane
    second: _Lane

    @classmethod
    def of(cls, n_bytes: int, device: torch.device) -> _Lanes:
        """Returns lanes with buffers of ``n_bytes``."""
        return cls(_Lane(n_bytes, device), _Lane(n_bytes, device))


def _pin(device: torch.device, address: int, n_bytes: int) -> None:
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = runtime.cudaHostRegister(address, n_bytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"the driver pins no more memory ({runtime.cudaGetErrorString(code)}; see ulimit -l)")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
