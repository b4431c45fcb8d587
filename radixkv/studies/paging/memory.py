"""What the token slots of a pool are used for, at a moment and on average."""

from __future__ import annotations

from typing import NamedTuple


class Memory(NamedTuple):
    """Token slots during a step. The first six add up to the pool."""

    occupied: int
    """They hold KV that a running sequence reads."""
    reserved: int
    """A running sequence has them, and will fill them."""
    internal: int
    """A running sequence has them, and never fills them."""
    external: int
    """Free, but not where the next request needs them: it waits, though they would hold it if they lay together."""
    free: int
    """The others that nobody has."""
    cached: int
    """They hold KV that no running sequence reads, and go to whom needs them."""
    duplicate: int
    """Of those occupied, those that hold what another one holds too."""
    stored: int
    """Tokens of all running sequences; more than slots are occupied where sequences share them."""
    entries: int
    """Of the tables that say where sequences have their slots."""

    @property
    def allocated(self) -> int:
        """What running sequences have."""
        return self.occupied + self.reserved + self.internal

    @property
    def pool(self) -> int:
        """All."""
        return self.allocated + self.external + self.free + self.cached


class Shares(NamedTuple):
    """The same on average over steps, in percent."""

    utilisation_pct: float
    """Occupied, of what was allocated."""
    occupied_pct: float
    """This and the next five are of the pool, and add up to 100."""
    reserved_pct: float
    internal_pct: float
    external_pct: float
    free_pct: float
    cached_pct: float
    duplicate_pct: float
    """Of what was occupied."""
    tokens_per_slot: float
    """Stored tokens by occupied slots: above 1 by sharing."""
    entries_per_1000_tokens: float
    """Of tables, by stored tokens."""

    @property
    def fragmentation_pct(self) -> float:
        """What nobody can use: internal and external, of the pool."""
        return self.internal_pct + self.external_pct

    @property
    def lost_pct(self) -> float:
        """What holds nothing, or a copy, of what was allocated."""
        return 100 - self.utilisation_pct * (1 - self.duplicate_pct / 100)


def shares(moments: list[Memory]) -> Shares:
    """The average of one moment or more, each of which counts the same."""
    total = Memory(*map(sum, zip(*moments, strict=True)))
    return Shares(
        utilisation_pct=_percent(total.occupied, total.allocated),
        occupied_pct=_percent(total.occupied, total.pool),
        reserved_pct=_percent(total.reserved, total.pool),
        internal_pct=_percent(total.internal, total.pool),
        external_pct=_percent(total.external, total.pool),
        free_pct=_percent(total.free, total.pool),
        cached_pct=_percent(total.cached, total.pool),
        duplicate_pct=_percent(total.duplicate, total.occupied),
        tokens_per_slot=_percent(total.stored, total.occupied) / 100,
        entries_per_1000_tokens=10 * _percent(total.entries, total.stored),
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
