"""How many steps of a device that waits for the host are not searched for drafts."""

from __future__ import annotations

_MAX_SHARE = 0.005
"""Time of fruitless searches as a share of that of steps."""
_MAX_STEPS = 16
"""Most steps that are not searched after one that was."""
_WEIGHT = 1 / 4
"""Weight of a new search in the moving average of their times."""
_MAX_RATIO = 2.0
"""A search counts as so many times the average at most: more is a pause of the machine."""


class SearchPauses:
    """Keeps fruitless searches a small share of the time, where the device does not compute beside them. O(1)."""

    def __init__(self) -> None:
        self._search_s = 0.0
        self._n_left = 0

    def skips_step(self) -> bool:
        """Returns whether the next step is not to be searched for, and counts it."""
        self._n_left = max(0, self._n_left - 1)
        return self._n_left > 0

    def search_failed(self, seconds: float, step_seconds: float) -> None:
        """Notes a search after which a step has no drafts.

        Args:
            seconds: that it took.
            step_seconds: that a step takes.
        """
        average = self._search_s or seconds
        self._search_s = average + _WEIGHT * (min(seconds, _MAX_RATIO * average) - average)
        self._n_left = 1 + min(int(self._search_s / (_MAX_SHARE * step_seconds)), _MAX_STEPS)
