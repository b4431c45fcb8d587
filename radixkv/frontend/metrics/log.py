"""What the server says on standard error: the stages of its start, and figures while it works."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from radixkv.errors import RequestError
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.metrics.stats_delta import Interval
from radixkv.wire import Stats

REMINDER_S = 15.0


class StatsSource(Protocol):
    """Who knows the runtime's counters."""

    async def stats(self) -> Stats:
        """Those of this moment. Raises ``RequestError``."""
        ...


def say(text: str) -> None:
    """One line."""
    print(f"radixkv: {text}", file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def stage(text: str, *, reminder_s: float = REMINDER_S) -> AsyncIterator[None]:
    """Says what begins, and from time to time that it still goes on."""
    say(text)
    reminding = asyncio.create_task(_remind(text, reminder_s))
    try:
        yield
    finally:
        reminding.cancel()
        await asyncio.gather(reminding, return_exceptions=True)


async def _remind(text: str, reminder_s: float) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(reminder_s)
        say(f"still {text}, for {time.monotonic() - begun:.0f} s")


class StatsLog:
    """A line of figures from time to time while there is work, and one after it ended.

    Args:
        source: is asked once an interval.
        show: takes each interval, also those of which there is nothing to say.
    """

    def __init__(
        self,
        source: StatsSource,
        interval_s: float,
        show: Callable[[Interval], None],
        *,
        write: Callable[[str], None] = say,
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._show = show
        self._write = write

    async def run(self) -> None:
        """Until the runtime is gone."""
        before, begun = None, 0.0
        with contextlib.suppress(RequestError):
            while True:
                try:
                    after, now = await self._source.stats(), time.monotonic()
                except RuntimeSilent:
                    continue  # a step that takes long; the next answer covers its time too
                if before is not None:
                    interval = Interval(before, after, now - begun)
                    self._show(interval)
                    if interval.has_work:
                        self._write(_line(interval))
                before, begun = after, now
                await asyncio.sleep(self._interval_s)


def _line(interval: Interval) -> str:
    stats = interval.after
    used = 1 - (stats.n_pages_free + stats.n_pages_evictable) / stats.n_pages
    cached = stats.n_pages_evictable / stats.n_pages
    hits = "no prompts" if interval.hit_rate is None else f"{interval.hit_rate:.1%} of prompt tokens were cached"
    return (
        f"{stats.n_running} running, {stats.n_waiting} waiting, "
        f"pool {used:.1%} in use and {cached:.1%} cached, {hits}, "
        f"{interval.prompt_tokens_per_s:.1f} prompt tokens/s, "
        f"{interval.generation_tokens_per_s:.1f} generated tokens/s"
    )
