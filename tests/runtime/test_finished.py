"""The descriptor of finished items: readable while there is one to take, and not afterwards."""

from __future__ import annotations

import os
import select
import threading
import time

import pytest

from radixkv.runtime.finished import Finished


def is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def add_in_a_thread(finished: Finished[int], items: range) -> threading.Thread:
    thread = threading.Thread(target=lambda: [finished.add(item) for item in items])
    thread.start()
    return thread


@pytest.fixture
def slow_events(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.eventfd_write

    def write_late(descriptor: int, value: int) -> None:
        time.sleep(0.02)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)


@pytest.mark.usefixtures("slow_events")
def test_an_item_that_was_taken_wakes_nobody() -> None:
    finished = Finished[int]()
    thread = add_in_a_thread(finished, range(1))
    while not (items := finished.take()):
        time.sleep(0)
    assert items == [0]
    assert not is_readable(finished.fileno(), timeout_s=0.1)
    thread.join()
    add_in_a_thread(finished, range(1)).join()
    assert is_readable(finished.fileno(), timeout_s=30.0)
    finished.close()


def test_each_item_of_several_threads_is_taken_once() -> None:
    finished, taken = Finished[int](), list[int]()
    threads = [add_in_a_thread(finished, range(first, first + 500)) for first in (0, 500, 1000)]
    while len(taken) < 1500:
        assert is_readable(finished.fileno(), timeout_s=30.0)
        taken += finished.take()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1500))
    assert finished.take() == []
    assert not is_readable(finished.fileno())
    finished.close()
