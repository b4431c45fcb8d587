"""Pins on the device and in the tiers behind it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from radixkv.errors import UnsupportedFeature
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.tier_pins import PinnedPrefix, TierPins
from radixkv.runtime.cache.transfers import Transfers
from radixkv.tree.node import Namespace


class Pins:
    """Pins prefixes on the device and in the host tier, each within the same budget. The disk tier has no pins.

    Args:
        device: the device's page cache.
        transfers: copy pages to and from the host tier; None without one.
        budget: fraction of a tier's pages that the pins of a namespace cover at most.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: PageCache,
        transfers: Transfers | None,
        *,
        budget: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.device = TierPins(device, budget, clock)
        """The pins on the device."""
        self.host = None if transfers is None else TierPins(transfers.host, budget, clock)
        """The pins of the host tier; None without one."""
        self._transfers = transfers
        self._shares = device.shares
        self._budget = budget
        self._clock = clock

    def check_available(self, field: str) -> None:
        """Raises ``UnsupportedFeature``, which names ``field``, if the settings allow no pins."""
        if not self._shares:
            raise UnsupportedFeature(
                "nothing can be pinned: prefix caching is off (--no-enable-prefix-caching)", param=field
            )
        if not self._budget:
            raise UnsupportedFeature("nothing can be pinned: the server has --pin-budget 0", param=field)

    def pin(self, namespace: Namespace, tokens: bytes, ttl_s: float, *, uses_tiers: bool = True) -> None:
        """Pins what is cached of a sequence, and stores it in the host tier, whatever the write policy.

        In the host tier, what is stored later is pinned when it is there. O(edges · log leaves), and a copy of the
        tokens.

        Args:
            namespace: namespace of the sequence.
            tokens: the sequence, little-endian int32.
            ttl_s: how long it is pinned, in seconds.
            uses_tiers: False pins it on the device only.
        """
        until = self._clock() + ttl_s
        self.device.pin(namespace, tokens, until)
        if self._transfers is not None and self.host is not None and uses_tiers:
            self.host.pin(namespace, tokens, until)
            self._transfers.offer(namespace, tokens, self.host.renew)

    def unpin(self, namespace: Namespace, tokens: bytes) -> None:
        """Ends the pin of exactly this sequence, in whole pages. O(tokens + edges · log leaves)."""
        for tier in self._tiers():
            tier.unpin(namespace, tokens)

    def expire(self) -> None:
        """Ends the pins whose time is over. O(1) if there are none."""
        for tier in self._tiers():
            tier.expire()

    def clear(self) -> None:
        """Ends all pins. O(pins · edges · log leaves)."""
        for tier in self._tiers():
            tier.clear()

    def find(self, namespace: Namespace, tokens: bytes) -> PinnedPrefix:
        """Returns how much of a prompt is pinned, on the device or in the host tier, whichever has more of it."""
        return max(tier.find(namespace, tokens) for tier in self._tiers())

    def _tiers(self) -> list[TierPins]:
        return [self.device] if self.host is None else [self.device, self.host]
