"""How long pauses between turns take: from an answer to the prompt that goes on from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from math import ceil

from radixkv.runtime.pauses.shared_room import SharedRoom
from radixkv.text.printable import printable
from radixkv.tree.reuse_rates import ReuseRates
from radixkv.wire.stats import MAX_SHOWN_KINDS, N_LATEST_RETURNS, PauseKindStats, kind_key

MAX_KINDS = 1024
"""Kinds of pauses that are remembered; of too many, the tenant with the most forgets its oldest."""
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
_MAX_TOOLS = 8
_MAX_NAME_CHARACTERS = 64
"""More of a kind is left out, so that each takes 2 KiB at most: models name tools."""
_CUT = "…"


def kind_of(tenant: str, tools: Iterable[str]) -> Kind:
    """Returns the kind of a pause after calls of tools. O(tools · log tools).

    Unprintable characters of their names are replaced, and what is too long is cut: tools that differ only there
    are one.
    """
    names = sorted({printable(name if len(name) <= _MAX_NAME_CHARACTERS else _cut(name)) for name in tools})
    return tenant, tuple(names if len(names) <= _MAX_TOOLS else [*names[: _MAX_TOOLS - 1], _CUT])


def _cut(name: str) -> str:
    return name[: _MAX_NAME_CHARACTERS - 1] + _CUT


@dataclass(slots=True)
class _Times:
    rates: ReuseRates = field(default_factory=lambda: ReuseRates(1))
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_LATEST_RETURNS))
    """The latest pauses that a prompt has ended."""
    longest_s: float = 0.0
    """The longest pause that has ended, or less."""
    n_returned: int = 0
    n_on_device: int = 0
    """The ended pauses whose conversation was on the device as a whole."""
    n_ended: int = 0
    """Those that have returned, and those that were given up."""

    def quantile_s(self, share: float) -> float | None:
        """Returns what this share of the latest returns took at most; None without any."""
        return sorted(self.latest_s)[ceil(share * len(self.latest_s)) - 1] if self.latest_s else None


class PauseTimes:
    """Learns how long pauses of each kind take.

    What is known of a kind is the share of its pauses that ended at each age, as ``ReuseRates`` has it of pages.
    Older observations count less with each new one.
    """

    def __init__(self) -> None:
        self._times = SharedRoom[Kind, _Times](MAX_KINDS)

    def add(self, kind: Kind, pause_s: float, *, has_returned: bool, is_on_device: bool = False) -> None:
        """Takes account of a pause that has ended, or was given up at this age. Some 0.1 ms."""
        times = self._times.get(kind)
        if times is None:
            times = _Times()
            self._times.put(kind[0], kind, times)
        else:
            self._times.renew(kind)
        times.rates.add(0, int(pause_s * _TICKS_PER_S), 1, were_used=has_returned)
        times.rates.update()
        times.n_returned += has_returned
        times.n_on_device += is_on_device
        times.n_ended += 1
        if has_returned:
            times.latest_s.append(pause_s)
            times.longest_s = max(pause_s, _LONGEST_DECAY * times.longest_s)

    def stats(self, n_open: Mapping[Kind, int]) -> dict[str, PauseKindStats]:
        """Returns counters of the kinds with the most pauses, and what is learnt of their times. O(kinds).

        Args:
            n_open: how many pauses of each kind are waited for.
        """
        kinds = dict.fromkeys(n_open, _Times()) | dict(self._times.items())
        n_seen = {kind: times.n_ended + n_open.get(kind, 0) for kind, times in kinds.items()}
        return {
            kind_key(*kind): PauseKindStats(
                n_open=n_open.get(kind, 0),
                returns_total=kinds[kind].n_returned,
                returns_on_device_total=kinds[kind].n_on_device,
                given_up_total=kinds[kind].n_ended - kinds[kind].n_returned,
                median_s=kinds[kind].quantile_s(0.5),
                p90_s=kinds[kind].quantile_s(0.9),
            )
            for kind in nlargest(MAX_SHOWN_KINDS, n_seen, key=n_seen.__getitem__)
        }

    def rate(self, kind: Kind, age_s: float) -> float:
        """Returns how many returns a second a pause of this age is expected to give while it is waited for.

        It is the best rate over all times that one may wait from now on. 0 where nothing is known. O(1).
        No two ages are alike where it rises or falls, so that the order of pauses of one kind is not by chance.
        """
        times = self._times.get(kind)
        return 0.0 if times is None else times.rates.smooth_rate(0, age_s * _TICKS_PER_S) * _TICKS_PER_S

    def patience_s(self, kind: Kind) -> float:
        """Returns the age at which a pause is given up. O(1)."""
        times = self._times.get(kind)
        if times is None or not times.longest_s:
            return _FIRST_PATIENCE_S
        return max(_MIN_PATIENCE_S, _PATIENCE * times.longest_s)
