"""Pages and states of recurrent layers in one host memory: by the copying kernels, and a driver that moves bytes.

Triton's interpreter runs the kernels; ``test_gpu_host_slots.py`` and ``test_gpu_recurrent.py`` have the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_support import DEVICE, on_kernels

from radixkv.runtime.device.memory.cuda import host_slots
from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
from radixkv.runtime.device.memory.cuda.host_slots import CudaHostSlots
from radixkv.runtime.device.memory.cuda.host_states import CudaHostStates
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape
from radixkv.runtime.device.memory.slab_shape import SlabShape
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.step.page_copier import MappedSlots, SlotPart

pytestmark = [*on_kernels, pytest.mark.skipif(DEVICE == "cuda", reason="its streams and driver are not real ones")]

PAGE = PageLayout.uniform(PageShape(1, 2, 4, 64, torch.float16))
"""Of 2 KiB, half a page of the machine."""
DELTA_NETS = RecurrentConfig(frozenset({0, 2}), n_key_heads=1, n_value_heads=2, key_dim=16, value_dim=20, n_taps=4)
N_PAGES, N_TREE_SLOTS = 30, 8
PIECE_BYTES = 18 << 10


class PlayedStream:
    def __init__(self, device: torch.device) -> None:
        self.stream = self

    def wait(self) -> None:
        pass


class MovingDriver:
    """Moves bytes at once. Checks that no copy crosses two pieces of the host's memory."""

    def __init__(self) -> None:
        self.pieces: list[range] = []

    def bus_id(self, device: torch.device) -> str:
        return ""

    def copy(self, destinations: Any, sources: Any, n_bytes: Any, stream: Any) -> None:
        for destination, source, size in zip(
            destinations.tolist(), sources.tolist(), n_bytes.tolist(), strict=True
        ):
            on_host = [[at in one for one in self.pieces] for at in (destination, source)]
            last = [[at + size - 1 in one for one in self.pieces] for at in (destination, source)]
            assert on_host == last
            assert sorted(map(any, on_host)) == [False, True], "not between host and device"
            ctypes.memmove(destination, source, size)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> MovingDriver:
    driver = MovingDriver()
    monkeypatch.setattr(host_slots, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(host_slots, "CopyStream", PlayedStream)
    monkeypatch.setattr(host_slots, "local_cpus", lambda bus_id: None)
    monkeypatch.setattr(
        host_slots, "_pin", lambda _, address, n_bytes: driver.pieces.append(range(address, address + n_bytes))
    )
    monkeypatch.setattr(host_slots, "_unpin", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return driver


def test_pages_and_window_pages_share_slots_in_pieces(driver: MovingDriver) -> None:
    """Of two layers without windows and five with them: a window page takes three slots, and a sixth of its slab is
    unused."""
    page = PageShape(7, 2, 4, 64, torch.float16)
    windows = (8, None, 8, 8, None, 8, 8)
    shape = SlabShape(PageLayout.uniform(page), windows, n_slabs=9, n_window_slabs=3)
    pool = CudaSlabPool(shape, torch.device("cpu"))
    for units in (pool.k, pool.v):
        units.normal_()
    n_slots, slab_bytes = 32, 3 * pool.page_bytes
    played: Any = driver
    host = CudaHostSlots(pool, n_slots * pool.page_bytes, played, CopyPace(lambda: False), slabs=pool.slabs)
    assert (pool.slabs.page_bytes, host.n_slots) == (slab_bytes, n_slots)
    while host.n_usable < host.n_slots:
        time.sleep(0.001)
    assert len(driver.pieces) > 3

    before = [(k.clone(), v.clone()) for k, v in pool.layers]
    pages, slots, loaded = [0, 7, 8, 20], [3, 0, 30, 31], [1, 6, 22, 24]
    window_pages, slabs, loaded_windows = [1, 10, 4, 11], [2, 3, 9, 5], [9, 1, 5, 3]
    host.store(pages, slots)
    assert host.windows is not None
    host.windows.store(list(zip(slabs, window_pages, strict=True)))
    for cache in (pool.k, pool.v):
        cache.zero_()
    host.load(slots, loaded)
    host.windows.load(list(zip(slabs, loaded_windows, strict=True)))
    for window, layer, old in zip(windows, pool.layers, before, strict=True):
        sources, places = (pages, loaded) if window is None else (window_pages, loaded_windows)
        for cache, wanted in zip(layer, old, strict=True):
            assert torch.equal(cache[places], wanted[sources])
    n_written = len(pages) * shape.page_values + len(slabs) * shape.slab_values
    assert int((pool.k.view(-1, 64) != 0).any(1).sum()) * 64 == n_written
    for n, buffer in enumerate(buffers := [host.buffer(slot) for slot in range(n_slots)]):
        buffer[:] = bytes([n]) * pool.page_bytes
    host.windows.load([(4, 0)])
    slab = torch.cat([cache.view(12 + 1, -1)[0] for cache in (pool.k, pool.v)]).view(torch.uint8)
    assert slab.view(3, -1).tolist() == [[n] * pool.page_bytes for n in (12, 13, 14)]
    for buffer in buffers:
        buffer.release()
    host.close()


def test_window_pages_of_ranks_are_side_by_side_in_the_memory_that_they_share(driver: MovingDriver) -> None:
    """Of three ranks two have the same part, of which one stores; each loads its own."""
    page = PageShape(7, 2, 4, 64, torch.float16)
    shape = SlabShape(PageLayout.uniform(page), (8, None, 8, 8, None, 8, 8), n_slabs=9, n_window_slabs=3)
    pools = [CudaSlabPool(shape, torch.device("cpu")) for _ in range(3)]
    for pool in pools:
        for units in (pool.k, pool.v):
            units.normal_()
    expected = [[units.clone() for units in (pools[part].k, pools[part].v)] for part in (0, 1, 1)]
    page_bytes, n_slots = pools[0].page_bytes, 32
    played: Any = driver
    memory = os.memfd_create("slots")
    hosts = []
    for rank, pool in enumerate(pools):
        part = SlotPart(memory, min(rank, 1), 2, stores=rank < 2, rank=rank, n_ranks=3)
        n_bytes = n_slots * 2 * page_bytes
        hosts.append(CudaHostSlots(pool, n_bytes, played, CopyPace(lambda: False), part, slabs=pool.slabs))
        while hosts[-1].n_usable < n_slots:
            time.sleep(0.001)
    window_pages, slabs, pages, slots = [1, 10, 4], [2, 3, 9], [0, 20, 8], [0, 31, 3]
    for host, pool in zip(hosts, pools, strict=True):
        assert (host.n_slots, host.page_bytes) == (n_slots, 2 * page_bytes)
        assert host.windows is not None
        host.windows.store(list(zip(slabs, window_pages, strict=True)))
        host.store(pages, slots)
        for units in (pool.k, pool.v):
            units.zero_()
    for host, pool, old in zip(hosts, pools, expected, strict=True):
        assert host.windows is not None
        host.windows.load(list(zip(slabs, window_pages, strict=True)))
        host.load(slots, pages)
        for units, wanted in zip((pool.k, pool.v), old, strict=True):
            for of_kind, n_values in ((window_pages, shape.slab_values), (pages, shape.page_values)):
                found = units.view(-1, n_values)[of_kind]
                assert found.any()
                assert torch.equal(found, wanted.view(-1, n_values)[of_kind])
    for host in hosts:
        host.close()
    os.close(memory)


def test_pages_and_states_share_pinned_memory_in_pieces(driver: MovingDriver) -> None:
    device = torch.device("cpu")
    pool = CudaPool(PAGE, N_PAGES, device)
    states = CudaStates(DELTA_NETS, 2, N_TREE_SLOTS, torch.float16, device)
    for values in (pool.k, pool.v, *(one for layer in states.layers for one in layer)):
        values.normal_()
    n_bytes = 50 * PAGE.n_bytes + 100
    slots = StateSlots(
        state_bytes=states.n_bytes,
        n_states=N_TREE_SLOTS,
        page_bytes=PAGE.n_bytes,
        n_pages=N_PAGES,
        n_bytes=n_bytes,
    )
    played: Any = driver
    pace = CopyPace(lambda: False)
    host = CudaHostSlots(pool, n_bytes, played, pace, state_slots=slots)
    stream: Any = PlayedStream(device)
    host_states = CudaHostStates(states, slots, host.memory, played, pace, stream, stream)
    assert slots.n_slots >= 3
    assert host.n_slots == 50 - slots.n_bytes // PAGE.n_bytes
    while host.n_usable < host.n_slots:
        time.sleep(0.001)
    assert len(driver.pieces) > 3

    expected = [one.clone() for one in (pool.k, pool.v)]
    expected_states = [one.clone() for layer in states.layers for one in layer]
    n_stored = min(N_PAGES // 2, host.n_slots)
    sources, places = range(n_stored), range(n_stored)
    n_states = min(slots.n_slots, N_TREE_SLOTS // 2)
    host.store(sources, places)
    host_states.store([(slot, slot) for slot in range(n_states)])
    for page, slot in zip(sources, places, strict=True):
        whole = torch.cat([pool.k[0, page], pool.v[0, page]])
        assert bytes(host.buffer(slot)) == whole.view(torch.uint8).numpy().tobytes()
    loaded = [N_PAGES - 1 - page for page in sources]
    host.load(places, loaded)
    host_states.load([(slot, N_TREE_SLOTS - 1 - slot) for slot in range(n_states)])
    for cache, wanted in zip((pool.k, pool.v), expected, strict=True):
        wanted[:, loaded] = wanted[:, list(sources)]
        assert torch.equal(cache, wanted)
    for found, wanted in zip((one for layer in states.layers for one in layer), expected_states, strict=True):
        for slot in range(n_states):
            wanted[2 + N_TREE_SLOTS - 1 - slot] = wanted[2 + slot]
        assert torch.equal(found, wanted)
    buffers = [host.buffer(slot) for slot in range(host.n_slots)]
    parts = [part for slot in range(slots.n_slots) for part in host_states.buffers(slot)]
    assert len(parts) + len(buffers) == 50
    for n, part in enumerate([*parts, *buffers]):
        part[:] = bytes([n]) * PAGE.n_bytes
    assert [part[0] for part in (*parts, *buffers)] == [*range(50)], "two slots overlap"
    for part in (*parts, *buffers):
        part.release()
    host.close()


def test_slots_that_another_object_has_mapped_are_loaded_beside_own_ones(driver: MovingDriver) -> None:
    """A header lies before each mapped page, and a rest behind it. No page lies in two pieces of pinned memory."""
    pool = CudaPool(PAGE, N_PAGES, torch.device("cpu"))
    for values in (pool.k, pool.v):
        values.normal_()
    n_slots, n_mapped, slot_bytes, first = 12, 9, 3 * mmap.PAGESIZE, 5 * mmap.PAGESIZE
    played: Any = driver
    host = CudaHostSlots(pool, n_slots * PAGE.n_bytes, played, CopyPace(lambda: False))
    while host.n_usable < n_slots:
        time.sleep(0.001)
    assert host.n_mapped_slots == 0
    expected = [one.clone() for one in (pool.k, pool.v)]
    mapping = mmap.mmap(-1, first + n_mapped * slot_bytes - mmap.PAGESIZE)
    memory = memoryview(mapping)
    sources = [3, 17, 8, 21, 0]
    host.store(sources, range(5))
    for slot, own in ((8, 0), (2, 1), (3, 2)):
        start = first + slot * slot_bytes
        memory[start : start + PAGE.n_bytes] = host.buffer(own)
    host.map_slots(MappedSlots(memory, first, slot_bytes, n_mapped))
    while host.n_mapped_slots < n_mapped:
        time.sleep(0.001)
    loaded = [29, 28, 27, 26, 25]
    for values in (pool.k, pool.v):
        values[:, loaded] = 0
    host.load([n_slots + 8, 3, n_slots + 2, n_slots + 3, 4], loaded)
    for cache, wanted in zip((pool.k, pool.v), expected, strict=True):
        wanted[:, loaded] = wanted[:, [sources[0], sources[3], sources[1], sources[2], sources[4]]]
        assert torch.equal(cache, wanted)
    host.close()
    assert host.n_mapped_slots == 0
    memory.release()
    mapping.close()  # nothing keeps it
