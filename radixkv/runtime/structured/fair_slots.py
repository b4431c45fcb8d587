"""Slots that jobs of several senders wait for in turn."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class FairSlots:
    """A semaphore that gives each free slot to the next sender in turn: of its jobs to the oldest and to the newest
    by turns, so that a job also passes a crowd that came before it from the same sender.

    For one event loop. All is O(1), but that leaving before a slot is free is O(jobs of the sender that wait).
    """

    def __init__(self, n_slots: int) -> None:
        self._n_free = n_slots
        self._waiting: dict[str, deque[Future[None]]] = {}
        """The jobs of each sender with any, the oldest first. The sender whose turn is next comes first."""
        self._newest_next: set[str] = set()
        """The senders whose next job is their newest. If all had one turn, two senders that alternate would get the
        oldest jobs of one and the newest of the other."""

    @asynccontextmanager
    async def slot(self, sender: str) -> AsyncGenerator[None]:
        """Waits for a slot and keeps it until the context ends."""
        if self._n_free:
            self._n_free -= 1
        else:
            await self._turn(sender)
        try:
            yield
        finally:
            self._give_back()

    async def _turn(self, sender: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(sender, turn)
            else:
                self._give_back()
            raise

    def _leave(self, sender: str, turn: Future[None]) -> None:
        jobs = self._waiting.get(sender, deque())
        with suppress(ValueError):  # the slot was given to the next job meanwhile
            jobs.remove(turn)
            if not jobs:
                del self._waiting[sender]
                self._newest_next.discard(sender)

    def _give_back(self) -> None:
        while self._waiting:
            sender = next(iter(self._waiting))
            jobs = self._waiting.pop(sender)
            turn = jobs.pop() if sender in self._newest_next else jobs.popleft()
            is_given = not turn.cancelled()
            if is_given:
                self._newest_next ^= {sender}
                turn.set_result(None)
            if jobs:
                self._waiting[sender] = jobs
            else:
                self._newest_next.discard(sender)
            if is_given:
                return
        self._n_free += 1
