"""What a rank says of its copies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.errors import ConfigError
from radixkv.runtime.device.memory.copy_threads import CopyThreads
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory
from radixkv.runtime.device.ranks.copy_server import serve_copies
from radixkv.runtime.device.ranks.frames import (
    Frames,
    RankCopied,
    RankCopy,
    RankMemory,
    RankRefused,
    RankSlots,
    decode,
    encode,
)
from radixkv.runtime.step.page_copier import SlotPart


class Slots:
    """Four slots, of which two are usable at first; slot 3 cannot be copied."""

    n_slots = 4
    page_bytes = 8

    def __init__(self) -> None:
        self.n_usable, self.is_growing = 2, True
        self.calls: list[tuple[str, list[int], list[int]]] = []
        self.is_closed = False

    def load(self, slots: Any, pages: Any) -> None:
        if 3 in slots:
            raise RuntimeError("the copy failed")
        self.calls.append(("load", list(slots), list(pages)))

    def store(self, pages: Any, slots: Any) -> None:
        self.calls.append(("store", list(slots), list(pages)))

    def buffer(self, slot: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True


class States:
    """One slot, from which nothing is loaded."""

    n_slots = 1

    def __init__(self) -> None:
        self.stored: list[tuple[int, int]] = []

    def buffers(self, slot: int) -> list[memoryview]:
        raise NotImplementedError

    def load(self, states: Any) -> None:
        raise NotImplementedError

    def store(self, states: Any) -> None:
        self.stored += states


class Device:
    """Opens the slots, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.slots, self.states = Slots(), States()
        self.error = error
        self.part: SlotPart | None = None

    def open_copier(self, host_memory_bytes: int, part: SlotPart) -> CopyThreads:
        self.part = part
        if self.error is not None:
            raise self.error
        return CopyThreads(self.slots, self.states)


@contextmanager
def served(device: Any) -> Iterator[Frames]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve_copies, args=(device, Frames(theirs), 7))
    thread.start()
    frames = Frames(ours)
    try:
        yield frames
    finally:
        frames.close()
        thread.join(10.0)
        assert not thread.is_alive()


def receive(frames: Frames) -> Any:
    frame = frames.receive()
    return None if frame is None else decode(frame, RankSlots | RankRefused | RankCopied)


def test_copies_are_done_and_answered_by_rank_0s_tickets() -> None:
    device = Device()
    with served(device) as frames:
        frames.send(encode(RankMemory(64, 1, 2, stores=True, rank=3, n_ranks=4)))
        assert receive(frames) == RankSlots(2, is_growing=True)
        assert device.part == SlotPart(7, 1, 2, stores=True, rank=3, n_ranks=4)
        device.slots.n_usable = 4
        assert receive(frames) == RankSlots(4, is_growing=True)
        device.slots.is_growing = False
        assert receive(frames) == RankSlots(4, is_growing=False)
        frames.send(encode(RankCopy(40, True, [1], [5])))
        assert receive(frames).ticket == 40
        frames.send(encode(RankCopy(41, False, [2], [6], [(0, 3)])))
        assert receive(frames).error is None
        frames.send(encode(RankCopy(42, True, [3], [6])))
        failed = receive(frames)
        assert (failed.ticket, failed.error) == (42, "RuntimeError: the copy failed")
    assert device.slots.calls == [("load", [1], [5]), ("store", [2], [6])]
    assert device.states.stored == [(0, 3)]
    assert device.slots.is_closed


def test_a_rank_without_a_tier_ends_with_its_stream() -> None:
    device = Device()
    with served(device):
        pass
    assert device.part is None


@pytest.mark.parametrize(
    "error", [ConfigError("too little"), OSError(12, "Cannot allocate memory"), RuntimeError("CUDA out of memory")]
)
def test_memory_that_cannot_be_opened_is_refused_with_the_reason(error: Exception) -> None:
    with served(Device(error)) as frames:
        frames.send(encode(RankMemory(64, 1, 2, stores=True, rank=3, n_ranks=4)))
        assert receive(frames) == RankRefused(str(error))
        assert receive(frames) is None


def test_a_slower_rank_clears_no_slot_that_all_can_use() -> None:
    """Each rank writes zeros before its part is usable, and rank 0 uses only what all ranks can."""
    descriptor = os.memfd_create("test")
    may_pin = threading.Event()
    pinned: list[int] = []

    def pin_later(address: int, n_bytes: int) -> None:
        may_pin.wait(10.0)
        pinned.append(n_bytes)

    def memory(pin: Any) -> PinnedMemory:
        return PinnedMemory(1 << 16, 1 << 15, pin=pin, unpin=lambda _: None, descriptor=descriptor)

    fast, slow = memory(lambda address, n_bytes: None), memory(pin_later)
    try:
        while fast.n_ready_bytes < 1 << 16:
            pass
        assert slow.n_ready_bytes == 0
        may_pin.set()
        while slow.n_ready_bytes < 1 << 16:
            pass
        fast.view[40_000] = 9
        assert np.frombuffer(slow.view, np.uint8)[40_000] == 9
        assert Path(f"/proc/self/fd/{descriptor}").stat().st_size == 1 << 16
    finally:
        slow.close()
        fast.close()
        os.close(descriptor)
