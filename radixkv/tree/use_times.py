"""When a tree was used, so that ages in uses can be told in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from time import monotonic

_RESOLUTION_S = 0.25
"""Uses in so short a time are remembered as one."""
_RESOLUTION = 0.005
"""A time is forgotten if the next one follows it within this part of its age."""
_MAX_TIMES = 4096


class UseTimes:
    """Remembers when a tree was used: of times long ago, fewer, so that each is known to about a percent.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._n_uses = 0
        self._uses: list[tuple[int, float]] = []
        """Number and time of each use that is remembered."""

    def add(self) -> None:
        """Notes a use that ends now. O(1) amortised."""
        self._n_uses += 1
        now = self._clock()
        if self._uses and now - self._uses[-1][1] < _RESOLUTION_S:
            return
        self._uses.append((self._n_uses, now))
        if len(self._uses) > _MAX_TIMES:
            self._forget(now)

    def seconds_since(self, n_uses_ago: int) -> float:
        """Returns the seconds since a use that ``n_uses_ago`` later uses have followed. O(log uses remembered)."""
        place = bisect_right(self._uses, self._n_uses - n_uses_ago, key=itemgetter(0))
        since = self._uses[max(0, place - 1)][1] if self._uses else self._clock()
        return max(0.0, self._clock() - since)

    def _forget(self, now: float) -> None:
        """Forgets the times that are not needed any more. O(times)."""
        kept: list[tuple[int, float]] = []
        later = now
        for use in reversed(self._uses):
            _, time = use
            if use is self._uses[0] or later - time >= _RESOLUTION * (now - time):
                kept.append(use)
                later = time
        self._uses = kept[::-1]
