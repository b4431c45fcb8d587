"""Virtual time: a clock, and copies between tiers that take time on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from radixkv.lab.simulator.instant_copies import InstantCopier, InstantStore
from radixkv.lab.simulator.step_time import StepTime
from radixkv.runtime.step.page_copier import FinishedCopy
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer


@dataclass
class Clock:
    """Virtual seconds, and when the copies in flight end."""

    now: float = 0.0
    ends: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Returns the seconds."""
        return self.now

    def next_end(self) -> float | None:
        """Returns when the next copy ends; None if none is in flight. O(log copies) a copy."""
        while self.ends and self.ends[0] <= self.now:
            heappop(self.ends)
        return self.ends[0] if self.ends else None


class VirtualTime(NamedTuple):
    """The time of a server whose steps and copies are modelled."""

    clock: Clock
    steps: StepTime
    page_bytes: int
    """Size of a page, by which copies are limited."""

    def take(self, plan: StepPlan) -> float:
        """Lets a step pass; returns how long it took. O(rows)."""
        seconds = self.steps.of_plan(plan)
        self.clock.now += seconds
        return seconds


class TimedCopier(InstantCopier):
    """Copies that end one after another: loads and stores each have a queue, as the server's threads.

    Args:
        clock: tells when a copy begins, and gets to know when it ends.
        page_bytes: size of a page.
        page_seconds: time to copy a page in either direction.
    """

    def __init__(self, clock: Clock, page_bytes: int, page_seconds: float) -> None:
        super().__init__(page_seconds)
        self.page_bytes = page_bytes
        self._clock, self._seconds = clock, page_seconds
        self._free_at = {True: 0.0, False: 0.0}
        self._ending: list[tuple[float, int, FinishedCopy]] = []

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """See ``PageCopier``."""
        return self._begin(len(pages), is_load=True)

    def store(self, pages: Sequence[int], slots: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """See ``PageCopier``."""
        return self._begin(len(pages), is_load=False)

    def take_finished(self) -> list[FinishedCopy]:
        """Returns the copies that have ended since the last call."""
        finished = []
        while self._ending and self._ending[0][0] <= self._clock.now:
            finished.append(heappop(self._ending)[2])
        return finished

    def _begin(self, n_pages: int, *, is_load: bool) -> int:
        ticket = next(self._tickets)
        end = max(self._clock.now, self._free_at[is_load]) + n_pages * self._seconds
        self._free_at[is_load] = end
        heappush(self._ending, (end, ticket, FinishedCopy(ticket, n_pages * self._seconds, None)))
        heappush(self._clock.ends, end)
        return ticket


class TimedStore(InstantStore):
    """A store whose reads end one after another; writes take no time.

    Args:
        clock: tells when a read begins, and gets to know when it ends.
        max_pages: pages that it may have.
        page_bytes: size of a page.
        page_seconds: time to read a page.
    """

    def __init__(self, clock: Clock, max_pages: int, page_bytes: int, page_seconds: float) -> None:
        super().__init__(max_pages, page_seconds)
        self.page_bytes = page_bytes
        self._clock, self._free_at = clock, 0.0
        self._ending: list[tuple[float, int, FinishedTransfer]] = []

    def load(self, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        """See ``PageStore``."""
        ticket = super().load(keys, tokens, buffers)
        finished = self._finished.pop()  # writes that have ended since the last turn stay
        self._free_at = max(self._clock.now, self._free_at) + finished.seconds
        heappush(self._ending, (self._free_at, ticket, finished))
        heappush(self._clock.ends, self._free_at)
        return ticket

    def take_finished(self) -> list[FinishedTransfer]:
        """See ``PageStore``."""
        finished = super().take_finished()
        while self._ending and self._ending[0][0] <= self._clock.now:
            finished.append(heappop(self._ending)[2])
        return finished
