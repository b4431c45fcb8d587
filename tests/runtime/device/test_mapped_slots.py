"""Slots in memory that another object has mapped: the CPU device's loads, and the pinning for a GPU."""

from __future__ import annotations

import logging
import mmap
import time

import pytest
import torch

from radixkv.runtime.device.memory.cpu.host_slots import CpuHostSlots
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape
from radixkv.runtime.device.memory.registered_memory import RegisteredMemory
from radixkv.runtime.step.page_copier import MappedSlots

TWO_SHAPES = PageLayout(
    (PageShape(3, 2, 4, 8, torch.float32), PageShape(1, 1, 4, 32, torch.float32)),
    (*(LayerPlace(0, layer) for layer in range(3)), LayerPlace(1, 0)),
)
FIRST, SLOT_BYTES, N_MAPPED = 3 * mmap.PAGESIZE, 2 * mmap.PAGESIZE, 7


def mapped_slots() -> MappedSlots:
    """Returns slots whose last one ends with the mapping."""
    n_bytes = FIRST + N_MAPPED * SLOT_BYTES - mmap.PAGESIZE
    return MappedSlots(memoryview(mmap.mmap(-1, n_bytes)), FIRST, SLOT_BYTES, N_MAPPED)


def test_pages_come_from_own_and_mapped_slots_in_one_load() -> None:
    pool = KVPool(TWO_SHAPES, 10)
    for part in pool.parts:
        for values in part:
            values.normal_()
    n_slots = 5
    host = CpuHostSlots(pool, n_slots * TWO_SHAPES.n_bytes)
    assert host.n_mapped_slots == 0
    mapped = mapped_slots()
    host.map_slots(mapped)
    assert host.n_mapped_slots == N_MAPPED
    host.store([0, 1, 2], [0, 1, 2])
    for slot, own in ((6, 0), (3, 1)):
        start = FIRST + slot * SLOT_BYTES
        mapped.memory[start : start + TWO_SHAPES.n_bytes] = host.buffer(own)
    expected = [values.clone() for part in pool.parts for values in part]
    host.load([n_slots + 6, 2, n_slots + 3], [7, 8, 9])
    for found, before in zip((values for part in pool.parts for values in part), expected, strict=True):
        before[:, [7, 8, 9]] = before[:, [0, 2, 1]]
        assert torch.equal(found, before)


class Pins:
    """Notes what is pinned, and refuses after some pieces."""

    def __init__(self, n_most: int = 100) -> None:
        self.pieces: dict[int, int] = {}
        self._n_most = n_most

    def pin(self, address: int, n_bytes: int) -> None:
        if len(self.pieces) == self._n_most:
            raise RuntimeError("the driver pins no more memory")
        self.pieces[address] = n_bytes

    def unpin(self, address: int) -> None:
        del self.pieces[address]


def registered(mapped: MappedSlots, pins: Pins, piece_bytes: int) -> RegisteredMemory:
    memory = RegisteredMemory(mapped, piece_bytes, pins.pin, pins.unpin)
    memory._thread.join(10.0)
    return memory


@pytest.mark.parametrize(
    ("piece_bytes", "n_pieces"), [(1, 7), (SLOT_BYTES, 7), (5 * mmap.PAGESIZE, 4), (1 << 30, 1)]
)
def test_each_page_lies_in_one_pinned_piece(piece_bytes: int, n_pieces: int) -> None:
    mapped, pins = mapped_slots(), Pins()
    mapped.memory[:] = b"x" * mapped.memory.nbytes
    memory = registered(mapped, pins, piece_bytes)
    assert (memory.n_ready, len(pins.pieces)) == (N_MAPPED, n_pieces)
    ranges = [range(first, first + n_bytes) for first, n_bytes in pins.pieces.items()]
    for slot in range(N_MAPPED):
        start = memory.address + slot * SLOT_BYTES
        assert sum(start in one and start + mmap.PAGESIZE - 1 in one for one in ranges) == 1
    end = memory.address - FIRST + mapped.memory.nbytes
    assert all(one.start % mmap.PAGESIZE == 0 and one.stop <= end for one in ranges)
    assert bytes(mapped.memory) == b"x" * mapped.memory.nbytes, "nothing is written"
    memory.close()
    memory.close()
    assert (memory.n_ready, pins.pieces) == (0, {})


def test_what_cannot_be_pinned_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins(n_most=2)
    with caplog.at_level(logging.WARNING):
        memory = registered(mapped_slots(), pins, SLOT_BYTES)
    assert memory.n_ready == 2
    (line,) = caplog.messages
    assert line == (
        "only 2 of 7 pages of the shared memory are copied to the device in place: the driver pins no more memory"
    )
    memory.close()
    assert not pins.pieces


def test_a_close_does_not_wait_for_all_pieces() -> None:
    begun = time.perf_counter()
    memory = RegisteredMemory(mapped_slots(), SLOT_BYTES, lambda _, n_bytes: time.sleep(0.2), lambda _: None)
    memory.close()
    assert time.perf_counter() - begun < 1.0
