"""The choice for each prompt of what is loaded, fetched or looked up, rather than computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.settings.config import LoadPolicy

_MAX_DECLINED = 32
"""After a step was declined so often, because it would take longer than it saves, it is taken anyway, to measure it
anew."""

Step: TypeAlias = Literal["load", "fetch", "lookup"]
"""What a prompt may wait for: a load from the host tier, a fetch from storage, or a lookup in a shared store."""


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
    n_declined: Counter[Step] = field(default_factory=Counter)
    """How often each step was declined for a prompt whose turn it was."""
    _n_in_a_row: Counter[Step] = field(default_factory=Counter)
    """How often each step was declined since it was last taken."""

    def should_load(self, cached: CachedPrefixes) -> bool:
        """Returns whether to load what other tiers have beyond the device, rather than compute it. O(1)."""
        n_host, n_disk = cached.n_beyond_device, cached.n_beyond_host
        if not n_host + n_disk or self.policy == "never":
            return False
        return self._is_due("fetch" if n_disk else "load") or self.cost.is_load_faster(
            n_host, n_disk, cached.fetch_s
        )

    def best(self, choices: Sequence[CachedPrefixes]) -> CachedPrefixes:
        """Returns the one of several ends of a fetch that gains most. O(choices).

        Args:
            choices: the longest first.
        """
        if self._is_due("fetch"):
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
        if self._is_due("lookup"):
            return True
        hoped = hoped._replace(fetch_s=hoped.fetch_s + self.cost.look_up_s)
        is_faster = self.cost.is_load_faster(hoped.n_beyond_device, hoped.n_beyond_host, hoped.fetch_s)
        return is_faster and self._gain_s(hoped) >= self._gain_s(known)

    def take(self, step: Step) -> None:
        """Notes that a step is taken. O(1)."""
        self._n_in_a_row[step] = 0

    def decline(self, step: Step) -> None:
        """Counts a step that a prompt goes without: it would take longer than it saves, or by ``never``. O(1)."""
        self._n_in_a_row[step] += 1
        self.n_declined[step] += 1

    def _is_due(self, step: Step) -> bool:
        """Whether to take a step even if it would take longer than it saves."""
        return self.policy == "always" or self._n_in_a_row[step] >= _MAX_DECLINED

    def _gain_s(self, cached: CachedPrefixes) -> float:
        return self.cost.gain_s(cached.n_beyond_device + cached.n_beyond_host, cached.fetch_s)
