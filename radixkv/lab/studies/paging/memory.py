"""The usage of a pool's token slots, in one step and averaged over steps."""

from __future__ import annotations

from typing import NamedTuple


class SlotUsage(NamedTuple):
    """Counts of token slots in one step. The first six fields add up to the pool."""

    occupied: int
    """Slots that hold KV read by a running sequence."""
    reserved: int
    """Empty slots of running sequences that will be filled."""
    internal: int
    """Empty slots of running sequences that will never be filled: internal fragmentation."""
    external: int
    """Free slots that would hold the next waiting request if they were contiguous: external fragmentation."""
    free: int
    """All other free slots."""
    cached: int
    """Slots that hold KV read by no running sequence; they are evicted on demand."""
    duplicate: int
    """Occupied slots whose KV another occupied slot holds too."""
    stored: int
    """Tokens of all running sequences; exceeds ``occupied`` if sequences share slots."""
    entries: int
    """Entries that lead from the tokens of all running sequences to their slots: one for each extent or page of a
    sequence, and for each granule in each tensor of the cache."""

    @property
    def allocated(self) -> int:
        """Slots allocated to running sequences."""
        return self.occupied + self.reserved + self.internal

    @property
    def pool(self) -> int:
        """All slots."""
        return self.allocated + self.external + self.free + self.cached


class SlotShares(NamedTuple):
    """Slot usage averaged over steps, in percent. The six shares of the pool, occupied to cached, add up to 100."""

    utilisation_pct: float
    """Occupied slots, of the allocated ones."""
    occupied_pct: float
    """Occupied slots, of the pool."""
    reserved_pct: float
    """Reserved slots, of the pool."""
    internal_pct: float
    """Internal fragmentation, of the pool."""
    external_pct: float
    """External fragmentation, of the pool."""
    free_pct: float
    """Free slots, of the pool."""
    cached_pct: float
    """Cached slots, of the pool."""
    duplicate_pct: float
    """Duplicate slots, of the occupied ones."""
    tokens_per_slot: float
    """Stored tokens per occupied slot; above 1 if slots are shared."""
    entries_per_1000_tokens: float
    """Entries per 1,000 stored tokens."""

    @property
    def fragmentation_pct(self) -> float:
        """Internal and external fragmentation, of the pool."""
        return self.internal_pct + self.external_pct

    @property
    def lost_pct(self) -> float:
        """Slots that are empty or hold a copy, of the allocated ones."""
        return 100 - self.utilisation_pct * (1 - self.duplicate_pct / 100)


def average_shares(usages: list[SlotUsage]) -> SlotShares:
    """Returns the average over one or more steps, each with equal weight."""
    total = SlotUsage(*map(sum, zip(*usages, strict=True)))
    return SlotShares(
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
