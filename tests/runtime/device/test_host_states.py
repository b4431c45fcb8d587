"""States in host memory: what comes back to the device, on the CPU and by a driver that only moves bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.memory.cpu.host_states import CpuHostStates
from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.cuda.host_states import CudaHostStates
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.step.page_copier import SlotPart

CONFIG = RecurrentConfig(frozenset({0, 1, 3}), n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=16, n_taps=4)
N_BATCH_SLOTS, N_TREE_SLOTS, PAGE_BYTES = 3, 5, 4096
HOST_BYTES = 40 * PAGE_BYTES


def slots_of(
    state_bytes: int, n_states: int, n_pages: int, *, n_bytes: int = HOST_BYTES, part: SlotPart | None = None
) -> StateSlots:
    return StateSlots(
        state_bytes=state_bytes,
        n_states=n_states,
        page_bytes=PAGE_BYTES,
        n_pages=n_pages,
        n_bytes=n_bytes,
        part=part,
    )


class MovingDriver:
    """Moves bytes within this process, when the stream is waited for."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, int, int]] = []
        self.stream = self
        self.n_calls = 0

    def copy(self, destinations: Any, sources: Any, n_bytes: Any, stream: Any) -> None:
        assert stream is self
        assert all(one.dtype == np.int64 and one.flags.c_contiguous for one in (destinations, sources, n_bytes))
        self.queued += zip(destinations.tolist(), sources.tolist(), n_bytes.tolist(), strict=True)
        self.n_calls += 1

    def wait(self) -> None:
        for one in self.queued:
            ctypes.memmove(*one)
        self.queued.clear()


class PlayedPace:
    def __init__(self) -> None:
        self.n_bytes = 0

    def wait(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes


class World(NamedTuple):
    states: Any
    host: Any
    slots: StateSlots
    memory: memoryview
    driver: MovingDriver
    pace: PlayedPace

    def contents(self) -> list[list[Tensor]]:
        """Returns what each slot has, of the batch and of the tree."""
        return [
            [one[slot].clone() for layer in self.states.layers for one in layer]
            for slot in range(N_BATCH_SLOTS + N_TREE_SLOTS)
        ]

    def check(self, expected: list[list[Tensor]]) -> None:
        for found, wanted in zip(self.contents(), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Make(Protocol):
    """Makes a world, or that of a rank in the memory of the first one."""

    def __call__(self, part: SlotPart | None = None) -> World: ...


@pytest.fixture(params=["cpu", "cuda"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    opened: list[PinnedMemory] = []

    def make_world(part: SlotPart | None = None) -> World:
        torch.manual_seed(0 if part is None else part.rank)
        dtype, driver, pace = torch.bfloat16, MovingDriver(), PlayedPace()
        states: Any
        host: Any
        if request.param == "cpu":
            states = RecurrentStates(CONFIG, N_BATCH_SLOTS, N_TREE_SLOTS, dtype)
        else:
            states = CudaStates(CONFIG, N_BATCH_SLOTS, N_TREE_SLOTS, dtype, torch.device("cpu"))
        slots = slots_of(states.n_bytes, N_TREE_SLOTS, 4, part=part)
        if part is None or not opened:
            opened.append(PinnedMemory(HOST_BYTES, HOST_BYTES, pin=lambda *_: None, unpin=lambda _: None))
        pinned = opened[-1]
        while pinned.n_ready_bytes < HOST_BYTES:
            time.sleep(0.001)
        if request.param == "cpu":
            host = CpuHostStates(states, slots, pinned.view[: slots.n_bytes])
        else:
            parts: Any = (slots, pinned, driver, pace, driver, driver)
            host = CudaHostStates(states, *parts)
        for layer in states.layers:
            for values in layer:
                values.normal_()
        for slot in range(N_TREE_SLOTS):
            states.set_position(slot, 1_000_000_000_064 + 64 * slot)
        return World(states, host, slots, pinned.view, driver, pace)

    yield make_world
    for memory in opened:
        memory.close()


def test_states_come_back_to_other_slots_with_their_positions(make: Make) -> None:
    """And nothing else changes, on the device or on the host."""
    world = make()
    assert world.host.n_slots == world.slots.n_slots >= 3
    before = world.contents()
    world.memory[:] = b"\xa5" * len(world.memory)
    world.host.store([(2, 0), (0, 3)])
    world.check(before)
    n_used = world.states.n_bytes + 8
    for slot, is_stored in ((0, True), (1, False), (2, True)):
        whole = b"".join(world.host.buffers(slot))
        assert (whole[:n_used] != b"\xa5" * n_used) == is_stored
        assert set(whole[n_used:]) == {0xA5}
    assert set(world.memory[3 * world.slots.slot_bytes :]) == {0xA5}
    world.host.load([(0, 1), (2, 4)])
    first = N_BATCH_SLOTS
    before[first + 1], before[first + 4] = before[first + 3], before[first]
    world.check(before)
    positions = [world.states.position(slot) - 1_000_000_000_064 for slot in range(N_TREE_SLOTS)]
    assert positions == [0, 3 * 64, 2 * 64, 3 * 64, 0]


def test_slots_are_whole_pages_that_another_tier_can_move(make: Make) -> None:
    """What another tier has read and written elsewhere comes back to an engine with other states."""
    world, other = make(), make()
    world.host.store([(0, 2)])
    parts = [bytes(part) for part in world.host.buffers(0)]
    assert {len(part) for part in parts} == {PAGE_BYTES}
    for buffer, part in zip(other.host.buffers(1), parts, strict=True):
        buffer[:] = part
    expected = other.contents()
    expected[N_BATCH_SLOTS + 4] = world.contents()[N_BATCH_SLOTS + 2]
    other.host.load([(1, 4)])
    other.check(expected)
    assert other.states.position(4) == world.states.position(2)


def test_a_gpu_moves_a_state_by_one_call_at_the_pace_of_pages(make: Make) -> None:
    world = make()
    world.host.store([(0, 0), (1, 1)])
    world.host.load([(1, 0)])
    if world.driver.n_calls:  # not the CPU
        assert (world.driver.n_calls, world.pace.n_bytes) == (3, 3 * world.states.n_bytes)


def test_ranks_have_their_parts_of_a_slot_side_by_side(make: Make) -> None:
    """Also where they have the same part of a page; rank 0 notes the position, and all read it."""
    worlds = [make(SlotPart(0, 0, 1, rank == 0, rank, 2)) for rank in range(2)]
    expected = [world.contents() for world in worlds]
    for world in worlds:
        world.host.store([(2, 0), (1, 1)])
    for world, wanted in zip(worlds, expected, strict=True):
        world.host.load([(2, 3), (1, 4)])
        for slot in (0, 1):
            wanted[N_BATCH_SLOTS + 3 + slot] = wanted[N_BATCH_SLOTS + slot]
        world.check(wanted)
        assert [world.states.position(slot) - 1_000_000_000_064 for slot in (3, 4)] == [0, 64]
    assert worlds[0].slots.slot_bytes == 4 * PAGE_BYTES
    whole = b"".join(worlds[1].host.buffers(2))
    assert not any(whole[2 * worlds[0].states.n_bytes + 8 :])


@pytest.mark.parametrize(("n_tree_slots", "n_pages", "n_slots"), [(5, 4, 6), (5, 0, 6), (5, 20, 4), (0, 10, 0)])
def test_memory_is_divided_as_the_devices_but_pages_have_half(
    n_tree_slots: int, n_pages: int, n_slots: int
) -> None:
    slots = slots_of(2 * PAGE_BYTES + 1000, n_tree_slots, n_pages)
    assert slots.slot_bytes == 3 * PAGE_BYTES
    assert (slots.n_slots, slots.n_bytes) == (n_slots, n_slots * slots.slot_bytes)


def test_too_little_memory_for_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="set --host-memory higher"):
        slots_of(2 * PAGE_BYTES, 1, 4, n_bytes=2 * PAGE_BYTES)
