"""How long pauses between turns take: from an answer to the prompt that goes on from it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from radixkv.tree.reuse_rates import ReuseRates

MAX_KINDS = 4096
"""Kinds of pauses that are remembered; those seen least recently are forgotten."""
_TICKS_PER_S = 64
"""Resolution of the times, which ``ReuseRates`` groups by powers of two."""
_PATIENCE = 3.0
"""A pause of more than so many times the longest one is taken for one that never ends."""
_MIN_PATIENCE_S = 1.0
_FIRST_PATIENCE_S = 600.0
"""The same where no pause has ended yet."""
_LONGEST_DECAY = 0.995
"""What remains of the longest pause with each that ends: times change."""

Kind = tuple[str, tuple[str, ...]]
"""Who asked for the answer, and the sorted names of the tools that it called; none: a user is to go on."""


@dataclass(slots=True)
class _Times:
    rates: ReuseRates = field(default_factory=lambda: ReuseRates(1))
    longest_s: float = 0.0
    """The longest pause that has ended, or less."""


class PauseTimes:
    """Learns how long pauses of each kind take.

    What is known of a kind is the share of its pauses that ended at each age, as ``ReuseRates`` has it of pages.
    Older observations count less with each new one.
    """

    def __init__(self) -> None:
        self._times: OrderedDict[Kind, _Times] = OrderedDict()
        """Those seen least recently come first."""

    def add(self, kind: Kind, pause_s: float, *, has_returned: bool) -> None:
        """Takes account of a pause that has ended, or was given up at this age. Some 0.1 ms."""
        times = self._times.setdefault(kind, _Times())
        self._times.move_to_end(kind)
        if len(self._times) > MAX_KINDS:
            self._times.popitem(last=False)
        times.rates.add(0, int(pause_s * _TICKS_PER_S), 1, were_used=has_returned)
        times.rates.update()
        if has_returned:
            times.longest_s = max(pause_s, _LONGEST_DECAY * times.longest_s)

    def rate(self, kind: Kind, age_s: float) -> float:
        """Returns how many returns a second a pause of this age is expected to give while it is waited for.

        It is the best rate over all times that one may wait from now on. 0 where nothing is known. O(1).
        """
        times = self._times.get(kind)
        return 0.0 if times is None else times.rates.rate(0, int(age_s * _TICKS_PER_S)) * _TICKS_PER_S

    def patience_s(self, kind: Kind) -> float:
        """Returns the age at which a pause is given up. O(1)."""
        times = self._times.get(kind)
        if times is None or not times.longest_s:
            return _FIRST_PATIENCE_S
        return max(_MIN_PATIENCE_S, _PATIENCE * times.longest_s)
