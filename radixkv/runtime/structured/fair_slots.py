"""Slots that jobs of several tenants wait for in turn."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class FairSlots:
    """A semaphore that gives each free slot to the next tenant in turn: of its jobs to the oldest and to the newest
    by turns, so that a job also passes a crowd that came before it from the same tenant.

    For one event loop. All is O(1), but that leaving before a slot is free is O(jobs of the tenant that wait).
    """

    def __init__(self, n_slots: int) -> None:
        self._n_free = n_slots
        self._waiting: dict[str, deque[Future[None]]] = {}
        """The jobs of each tenant with any, the oldest first. The tenant whose turn is next comes first."""
        self._newest_next: set[str] = set()
        """The tenants whose next job is their newest. If all had one turn, two tenants that alternate would get the
        oldest jobs of one and the newest of the other."""

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncGenerator[None]:
        """Waits for a slot and keeps it until the context ends."""
        if self._n_free:
            self._n_free -= 1
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._give_back()

    async def _turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:
                self._give_back()
            raise

    def _leave(self, tenant: str, turn: Future[None]) -> None:
        jobs = self._waiting.get(tenant, deque())
        with suppress(ValueError):  # the slot was given to the next job meanwhile
            jobs.remove(turn)
            if not jobs:
                del self._waiting[tenant]
                self._newest_next.discard(tenant)

    def _give_back(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            turn = jobs.pop() if tenant in self._newest_next else jobs.popleft()
            is_given = not turn.cancelled()
            if is_given:
                self._newest_next ^= {tenant}
                turn.set_result(None)
            if jobs:
                self._waiting[tenant] = jobs
            else:
                self._newest_next.discard(tenant)
            if is_given:
                return
        self._n_free += 1
