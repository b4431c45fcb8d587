"""In which order jobs get slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from radixkv.runtime.structured.fair_slots import FairSlots


class Jobs:
    """Jobs that each keep their slot until ``end``."""

    def __init__(self, n_slots: int) -> None:
        self.slots = FairSlots(n_slots)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *names: str) -> None:
        """Adds jobs, whose tenant is the first letter of their names."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await settle()

    async def end_all(self) -> list[str]:
        """Ends all jobs in the order in which they begin; returns the names of those that began from now on."""
        n_begun, i = len(self.begun), 0
        while i < len(self.begun):
            await self.end(self.begun[i])
            i += 1
        return self.begun[n_begun:]

    async def _run(self, name: str) -> None:
        async with self.slots.slot(name[0]):
            self.begun.append(name)
            await self.ends[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[Jobs], Awaitable[None]], n_slots: int = 1) -> None:
    async def main() -> None:
        await test(Jobs(n_slots))

    asyncio.run(main())


def test_as_many_jobs_begin_as_there_are_slots() -> None:
    async def test(jobs: Jobs) -> None:
        await jobs.add("a1", "a2", "a3", "b1")
        assert jobs.begun == ["a1", "a2"]
        await jobs.end("a2")
        assert len(jobs.begun) == 3
        await jobs.end_all()
        await jobs.add("a5", "a6", "a7")
        assert jobs.begun[4:] == ["a5", "a6"]

    run(test, n_slots=2)


def test_each_of_two_tenants_gets_its_oldest_and_its_newest_job_by_turns() -> None:
    async def test(jobs: Jobs) -> None:
        await jobs.add("c0", *(f"{tenant}{i}" for i in range(4) for tenant in "ab"))
        assert await jobs.end_all() == ["a0", "b0", "a3", "b3", "a1", "b1", "a2", "b2"]

    run(test)


def test_tenants_take_turns() -> None:
    async def test(jobs: Jobs) -> None:
        await jobs.add("a0", *(f"a{i}" for i in range(1, 6)), "b1", "b2", "c1")
        assert [name[0] for name in await jobs.end_all()] == list("abcabaaa")

    run(test)


def test_of_a_tenants_jobs_the_oldest_and_the_newest_begin_by_turns() -> None:
    async def test(jobs: Jobs) -> None:
        await jobs.add("a0", "a1", "a2", "a3", "a4")
        assert await jobs.end_all() == ["a1", "a4", "a2", "a3"]

    run(test)


def test_a_cancelled_job_takes_no_slot_and_loses_none() -> None:
    async def test(jobs: Jobs) -> None:
        await jobs.add("a0", "a1", "b1", "c1", "d1")
        await jobs.cancel("b1")
        jobs.ends["a0"].set()
        jobs.tasks["a0"].cancel()
        jobs.tasks["a1"].cancel()  # while it is given the slot, or before
        await settle()
        assert await jobs.end_all() in (["d1"], [])
        assert jobs.begun == ["a0", "c1", "d1"]
        await jobs.add("e1", "e2")
        assert jobs.begun[3:] == ["e1"]
        await jobs.cancel("e1")
        assert jobs.begun[3:] == ["e1", "e2"]

    run(test)
