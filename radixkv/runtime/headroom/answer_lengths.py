"""How long answers will be, from those that have ended."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable

MAX_LENGTHS = 128
"""Lengths that are remembered of each key: few enough that a change of the traffic is noticed soon."""
MIN_LENGTHS = 4
"""Fewest lengths from which others are expected."""
MAX_KEYS = 4096
"""Keys that are remembered, in 25 MiB at most; beyond that, the one that was used least recently is forgotten."""


class LastLengths:
    """The lengths of the last ``MAX_LENGTHS`` answers, as a distribution."""

    __slots__ = ("_in_order", "_sorted")

    def __init__(self) -> None:
        self._in_order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Adds a length, in the place of the oldest one if there are enough. O(lengths), of which C moves most."""
        if len(self._in_order) == MAX_LENGTHS:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float, length: int) -> int | None:
        """Returns a length such that ``share`` of the answers longer than ``length`` are shorter.

        None if fewer than ``MIN_LENGTHS`` are known, or none of them is longer. O(log lengths).

        Args:
            share: from 0 to 1, without 1.
            length: tokens.
        """
        n_shorter = bisect_right(self._sorted, length)
        n_longer = len(self._sorted) - n_shorter
        if not n_longer or len(self._sorted) < MIN_LENGTHS:
            return None
        return self._sorted[n_shorter + int(share * n_longer)]


class AnswerLengths:
    """The lengths of the last answers by keys, such as their tenant or session."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, LastLengths] = OrderedDict()
        """The keys used least recently come first."""

    def add(self, keys: Iterable[Hashable], length: int) -> None:
        """Learns the length of an answer, for each of its keys. Costs what ``LastLengths.add`` does, for each."""
        for key in keys:
            self._by_key.setdefault(key, LastLengths()).add(length)
            self._by_key.move_to_end(key)
        while len(self._by_key) > MAX_KEYS:
            self._by_key.popitem(last=False)

    def quantile(self, keys: Iterable[Hashable], share: float, length: int) -> int | None:
        """Returns what ``LastLengths.quantile`` does for the first key for which it is known; None if for none."""
        for key in keys:
            lengths = self._by_key.get(key)
            found = None if lengths is None else lengths.quantile(share, length)
            if found is not None:
                return found
        return None
