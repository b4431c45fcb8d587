"""Threads for calls that block: idle ones are used again, a hanging call delays no other, and all end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from radixkv.runtime.tiers.stores import blocking_calls
from radixkv.runtime.tiers.stores.blocking_calls import CallThreads

LIMIT_S = 60.0
NAME = "calls-of-a-test"


def n_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def wait_for_threads(n: int) -> None:
    end = time.monotonic() + LIMIT_S
    while n_threads() != n:
        assert time.monotonic() < end, f"{n_threads()} threads, not {n}"
        time.sleep(0.01)


def test_calls_one_after_another_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "_IDLE_S", LIMIT_S)

    async def call() -> set[int]:
        threads = CallThreads(NAME)
        used = set()
        for _ in range(50):
            used.add(await threads.run(threading.get_ident))
            await asyncio.sleep(0.001)  # until the thread waits for a call
        return used

    assert len(asyncio.run(call())) < 10, "some calls may come before the thread waits again"


def test_a_hanging_call_delays_no_other_and_can_be_cancelled() -> None:
    is_open = threading.Event()

    async def call() -> list[int]:
        threads = CallThreads(NAME)
        hanging = [asyncio.create_task(threads.run(is_open.wait)) for _ in range(5)]
        numbers = await asyncio.gather(*(threads.run(lambda number=number: number) for number in range(100)))
        hanging[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging[0]
        is_open.set()
        assert await asyncio.gather(*hanging[1:]) == [True] * 4
        return numbers

    assert asyncio.run(asyncio.wait_for(call(), LIMIT_S)) == list(range(100))


def test_an_error_comes_back_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise OSError("no such disk")

    async def call() -> int:
        threads = CallThreads(NAME)
        with pytest.raises(OSError, match="no such disk"):
            await threads.run(fail)
        return await threads.run(lambda: 3)

    assert asyncio.run(call()) == 3


def test_a_call_without_a_thread_is_not_made_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system starts no thread for the second call, while the first one's is busy."""
    is_open, made = threading.Event(), []

    def fail_to_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def call() -> int:
        threads = CallThreads(NAME)
        first = asyncio.create_task(threads.run(is_open.wait))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail_to_start)
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run(lambda: made.append(2))
        is_open.set()
        assert await first
        await asyncio.sleep(0.1)  # until the thread waits for a call
        is_open.clear()
        hanging = asyncio.create_task(threads.run(is_open.wait))
        await asyncio.sleep(0)
        number = await asyncio.wait_for(threads.run(lambda: 3), LIMIT_S / 6)
        is_open.set()
        assert await hanging
        return number

    assert asyncio.run(call()) == 3
    assert not made


def test_threads_end_when_no_call_comes_and_no_call_is_lost_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come while threads are about to end."""
    wait_for_threads(0)
    monkeypatch.setattr(blocking_calls, "_IDLE_S", 0.002)

    async def call() -> int:
        threads = CallThreads(NAME)
        n_done = 0
        for number in range(300):
            await asyncio.wait_for(threads.run(lambda: None), LIMIT_S)
            await asyncio.sleep(0.0005 * (number % 9))
            n_done += 1
        return n_done

    assert asyncio.run(call()) == 300
    wait_for_threads(0)
