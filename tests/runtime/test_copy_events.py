"""The event of finished copies and transfers: readable while there is one to take, and not afterwards."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

import pytest

from radixkv.runtime.cache.tiers.transfer_threads import TransferThreads, Urgency
from radixkv.runtime.device.copy_threads import CopyThreads


class NoSlots:
    """Host slots whose copies take no time."""

    n_slots = n_usable = page_bytes = 1

    def buffer(self, slot: int) -> memoryview:
        return memoryview(b"")

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None: ...

    def store(self, pages: Sequence[int], slots: Sequence[int]) -> None: ...

    def close(self) -> None: ...


def is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


@pytest.fixture
def slow_events(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.eventfd_write

    def write_late(descriptor: int, value: int) -> None:
        time.sleep(0.02)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)


def take_one(take_finished: Callable[[], Sequence[object]]) -> None:
    while not (finished := take_finished()):
        time.sleep(0)
    assert len(finished) == 1


@pytest.mark.usefixtures("slow_events")
def test_a_copy_that_was_taken_wakes_nobody() -> None:
    copier = CopyThreads(NoSlots())
    copier.load([0], [0])
    take_one(copier.take_finished)
    assert not is_readable(copier.fileno(), timeout_s=0.1)
    copier.store([0], [0])
    assert is_readable(copier.fileno(), timeout_s=30.0)
    copier.close()


@pytest.mark.usefixtures("slow_events")
def test_a_transfer_that_was_taken_wakes_nobody() -> None:
    threads = TransferThreads(2, "test")
    threads.start(Urgency.LOAD, [lambda: True], 1)
    take_one(threads.take_finished)
    assert not is_readable(threads.fileno(), timeout_s=0.1)
    threads.start(Urgency.STORE, [lambda: True], 1)
    assert is_readable(threads.fileno(), timeout_s=30.0)
    threads.close(1.0)
