"""Memory that becomes usable piece by piece, with a device that is only played."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from radixkv.errors import ConfigError
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory

PIECE = 1 << 16


class PlayedDevice:
    """Pins up to ``n_pieces`` pieces, and keeps a record."""

    def __init__(self, n_pieces: int = 1 << 30) -> None:
        self.n_pieces = n_pieces
        self.pinned: dict[int, int] = {}
        self.cpus: set[int] = set()

    def pin(self, address: int, n_bytes: int) -> None:
        if len(self.pinned) == self.n_pieces:
            raise RuntimeError("no more today")
        self.cpus = os.sched_getaffinity(0)
        self.pinned[address] = n_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def wait_for(memory: PinnedMemory, n_bytes: int) -> None:
    while memory.n_ready_bytes < n_bytes:
        time.sleep(0.001)


def test_every_byte_is_pinned_once_and_can_be_written() -> None:
    device, n_bytes = PlayedDevice(), 5 * PIECE + 4096
    memory = PinnedMemory(n_bytes, PIECE, device.pin, device.unpin)
    wait_for(memory, n_bytes)
    starts = [memory.address + i * PIECE for i in range(6)]
    assert device.pinned == dict.fromkeys(starts, PIECE) | {starts[-1]: 4096}
    ctypes.memset(memory.address, 7, n_bytes)
    assert ctypes.string_at(memory.address + n_bytes - 3, 3) == b"\7\7\7"
    memory.close()
    assert device.pinned == {}


def test_memory_that_cannot_be_pinned_ends_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = PlayedDevice(n_pieces=2)
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(9 * PIECE, PIECE, device.pin, device.unpin)
        wait_for(memory, 2 * PIECE)
        while memory.is_growing:
            time.sleep(0.001)
    assert memory.n_ready_bytes == 2 * PIECE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no more today" in caplog.text
    memory.close()
    assert device.pinned == {}
    assert len(caplog.records) == 1


def test_closing_does_not_wait_for_all_pieces() -> None:
    device, n_pinned = PlayedDevice(), []

    def pin_slowly(address: int, n_bytes: int) -> None:
        time.sleep(0.01)
        device.pin(address, n_bytes)
        n_pinned.append(n_bytes)

    memory = PinnedMemory(3000 * 4096, 4096, pin_slowly, device.unpin)
    wait_for(memory, 4096)
    memory.close()
    assert len(n_pinned) < 3000
    assert device.pinned == {}


def test_a_process_that_ends_while_memory_is_pinned_ends_silently() -> None:
    program = """
import time
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory
memory = PinnedMemory(1 << 30, 4096, lambda address, n_bytes: None, lambda address: None)
while not memory.n_ready_bytes:
    time.sleep(0.001)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_memory_that_a_hanging_thread_uses_can_be_closed() -> None:
    device = PlayedDevice()
    memory = PinnedMemory(2 * PIECE, PIECE, device.pin, device.unpin)
    wait_for(memory, 2 * PIECE)
    used = memory.view[PIECE : PIECE + 5]
    memory.close()
    assert device.pinned == {}
    assert bytes(used) == bytes(5)


def test_the_thread_runs_on_the_given_cpus() -> None:
    before = os.sched_getaffinity(0)
    device, cpu = PlayedDevice(), min(before)
    memory = PinnedMemory(PIECE, PIECE, device.pin, device.unpin, {cpu})
    wait_for(memory, PIECE)
    memory.close()
    assert device.cpus == {cpu}
    assert os.sched_getaffinity(threading.get_native_id()) == before


def test_more_memory_than_addresses_is_refused() -> None:
    device = PlayedDevice()
    for n_bytes in (1 << 60, 1 << 70):
        with pytest.raises(ConfigError, match="host.memory"):
            PinnedMemory(n_bytes, PIECE, device.pin, device.unpin)


def test_more_memory_than_the_machine_has_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The piece is larger than the memory that is left, and must not be touched."""
    device, n_bytes = PlayedDevice(), 1 << 43
    with caplog.at_level(logging.WARNING):
        try:
            memory = PinnedMemory(n_bytes, n_bytes, device.pin, device.unpin)
        except ConfigError:  # a machine that does not overcommit
            return
        while not caplog.records:
            time.sleep(0.001)
    assert memory.n_ready_bytes == 0
    memory.close()
