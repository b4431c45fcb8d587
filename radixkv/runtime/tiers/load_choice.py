"""The choice for each prompt of what is loaded, fetched or looked up, rather than computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.settings.config import LoadPolicy

_MAX_DECLINED = 32
"""After this many prompts that were computed because that was faster, one is loaded anyway, to measure the rate
anew. Fetches and lookups have counts of their own with this limit."""


class CachedPrefixes(NamedTuple):
    """Lengths of a prompt's cached prefixes in each tier, in tokens of whole pages."""

    n_device: int
    n_host: int
    n_disk: int = 0
    """In host tier and disk together, as far as a fetch is of use; 0 if the disk was not looked at."""
    fetch_s: float = 0.0
    """Estimated time of the fetch of what the disk has beyond the others."""

    @property
    def n_beyond_device(self) -> int:
        """Tokens that the host tier has after those on the device."""
        return max(0, self.n_host - self.n_device)

    @property
    def n_beyond_host(self) -> int:
        """Tokens that the disk has after those on the device and in the host tier."""
        return max(0, self.n_disk - max(self.n_host, self.n_device))


@dataclass(slots=True)
class LoadChoice:
    """Chooses by the times that loading and computing are estimated to take, and counts what it has declined.

    Args:
        policy: whether to load (``always``), to compute (``never``), or to do what is faster (``auto``).
        cost: estimates the times.
    """

    policy: LoadPolicy = "auto"
    cost: LoadCost = field(default_factory=LoadCost)
    n_hits_computed: int = 0
    """Admissions that compute tokens which the host tier has, because loading them would take longer."""
    _n_loads_declined: int = 0
    """Prompts computed since the last load because that is faster."""
    _n_fetches_declined: int = 0
    """Prompts that were not fetched from disk since the last fetch because computing is faster."""
    _n_lookups_declined: int = 0
    """Prompts that were not looked up in a shared store since the last lookup, because that takes longer."""

    def should_load(self, cached: CachedPrefixes) -> bool:
        """Returns whether to load what other tiers have beyond the device, rather than compute it. O(1)."""
        n_host, n_disk = cached.n_beyond_device, cached.n_beyond_host
        if not n_host + n_disk or self.policy == "never":
            return False
        n_declined = self._n_fetches_declined if n_disk else self._n_loads_declined
        return self._loads_anyway(n_declined) or self.cost.is_load_faster(n_host, n_disk, cached.fetch_s)

    def best(self, choices: Sequence[CachedPrefixes]) -> CachedPrefixes:
        """Returns the one of several ends of a fetch that gains most. O(choices).

        Args:
            choices: the longest first.
        """
        if self._loads_anyway(self._n_fetches_declined):
            return choices[0]
        return max(choices, key=self._gain_s)

    def should_look_up(self, hoped: CachedPrefixes, known: CachedPrefixes) -> bool:
        """Returns whether to ask a shared store for more, rather than take or compute what is known at once. O(1).

        Args:
            hoped: what can be fetched if that store has the rest of the prompt; its time is that without a lookup.
            known: the best that can be fetched without.
        """
        if self.policy == "never":
            return False
        if self._loads_anyway(self._n_lookups_declined):
            return True
        hoped = hoped._replace(fetch_s=hoped.fetch_s + self.cost.look_up_s)
        is_faster = self.cost.is_load_faster(hoped.n_beyond_device, hoped.n_beyond_host, hoped.fetch_s)
        return is_faster and self._gain_s(hoped) >= self._gain_s(known)

    def count_load(self, *, is_declined: bool) -> None:
        """Counts a prompt that is loaded, or computed because that is faster. O(1)."""
        self.n_hits_computed += is_declined
        self._n_loads_declined = self._n_loads_declined + 1 if is_declined else 0

    def count_fetch(self, *, is_declined: bool) -> None:
        """Counts a prompt that is fetched, or not because computing it is faster. O(1)."""
        self._n_fetches_declined = self._n_fetches_declined + 1 if is_declined else 0

    def count_lookup(self, *, is_declined: bool) -> None:
        """Counts a prompt that is looked up, or not because that takes longer. O(1)."""
        self._n_lookups_declined = self._n_lookups_declined + 1 if is_declined else 0

    def _loads_anyway(self, n_declined: int) -> bool:
        """Whether to load even if computing is faster, after ``n_declined`` prompts for which it was."""
        return self.policy == "always" or n_declined >= _MAX_DECLINED

    def _gain_s(self, cached: CachedPrefixes) -> float:
        return self.cost.gain_s(cached.n_beyond_device + cached.n_beyond_host, cached.fetch_s)
