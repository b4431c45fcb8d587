"""Calls that are due at a time of the loop's clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf


class Alarms:
    """Has the times at which calls are due, one for each call."""

    def __init__(self) -> None:
        self._times: dict[Callable[[], None], float] = {}
        self.next_at = inf
        """When the next call is due, in seconds of the loop's clock."""

    def set(self, call: Callable[[], None], at: float) -> None:
        """Makes a call due at a time, in place of the time that it had; ``inf`` is never. O(calls)."""
        self._times[call] = at
        self.next_at = min(self._times.values())

    def ring(self, now: float) -> None:
        """Makes each call that is due, once. A call may set its next time. O(calls)."""
        for call, at in list(self._times.items()):
            if at <= now:
                self.set(call, inf)
                call()
