"""Statistics of how soon cached pages are used again."""

from __future__ import annotations

from math import log2

_N_AGES = 48
_DECAY = 0.97
"""What remains of older observations at each update."""


class ReuseRates:
    """Expected hits per time of pages, by class and age, from what became of earlier pages.

    A page's *age* is the time since its last use. Ages are grouped by powers of two. An observation is the end of a
    page's wait: it was used again at some age, or forgotten without a use.

    Args:
        n_classes: classes of pages, which are told apart.
    """

    def __init__(self, n_classes: int) -> None:
        self.n_new = 0
        """Observations since the last update."""
        self._n_used = [[0.0] * _N_AGES for _ in range(n_classes)]
        self._n_ended = [[0.0] * _N_AGES for _ in range(n_classes)]
        """Observations by class and group of ages: those that were used again, and all."""
        self._rates = [[0.0] * _N_AGES for _ in range(n_classes)]

    def add(self, group: int, age: int, n_pages: int, *, were_used: bool) -> None:
        """Takes an observation of some pages of a class into account, from the next update on. O(1)."""
        index = min(age.bit_length(), _N_AGES - 1)
        self.n_new += n_pages
        self._n_ended[group][index] += n_pages
        if were_used:
            self._n_used[group][index] += n_pages

    def rate(self, group: int, age: int) -> float:
        """Returns the hits per time that a page of this class and age is expected to give, as of the last update.

        It is the best rate over all times that the page may be kept from now on (a Gittins index): the hits until
        then, divided by the time that pages stay until then or until their hit. 0 where nothing is known. O(1).
        """
        return self._rates[group][min(age.bit_length(), _N_AGES - 1)]

    def smooth_rate(self, group: int, age: float) -> float:
        """Returns what ``rate`` does, linear in the logarithm of the age between the middles of the groups of ages.

        It tells ages of one group apart. O(1).
        """
        place = log2(max(age, 1.0)) + 0.5  # a whole number in the middle of each group
        index = min(int(place), _N_AGES - 2)
        share = min(place - index, 1.0)
        rates = self._rates[group]
        return (1.0 - share) * rates[index] + share * rates[index + 1]

    def update(self) -> None:
        """Computes the rates of all classes and ages, and lets older observations count less. About 0.2 ms."""
        self.n_new = 0
        self._rates = [_rates(*counts) for counts in zip(self._n_used, self._n_ended, strict=True)]
        for counts in (*self._n_used, *self._n_ended):
            counts[:] = [_DECAY * n_pages for n_pages in counts]


def _rates(n_used: list[float], n_ended: list[float]) -> list[float]:
    """Returns the rates of one class, by group of ages."""
    waits: list[float] = []
    """Time that pages have waited in each group, together: those that end in it count half of it."""
    n_older = 0.0
    for index in reversed(range(_N_AGES)):
        waits.append(2.0 ** (index - 1) * (n_older + n_ended[index] / 2))
        n_older += n_ended[index]
    waits.reverse()
    rates = [0.0] * _N_AGES
    n_known = max((index + 1 for index, n in enumerate(n_ended) if n), default=0)
    for first in range(n_known):
        hits = wait = 0.0
        for last in range(first, n_known):
            hits += n_used[last]
            wait += waits[last]
            if hits:
                rates[first] = max(rates[first], hits / wait)
    return rates
