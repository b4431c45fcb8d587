"""The fingerprints of recent requests, in bounded memory and for a bounded time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.wire.request_limits import MAX_TTL_S

MAX_KEPT_BYTES = 1 << 23
"""Most memory of the fingerprints of one tenant: some 4,000 prompts of 8,000 tokens in pages of 16, or 150 of
100,000."""


class KeptFingerprints:
    """An LRU cache of fingerprints for each tenant.

    A tenant's requests neither find nor drop those of another.

    Args:
        max_bytes: most memory of a tenant's fingerprints.
        max_age_s: how long one is kept at most, in seconds: as long as a prompt can be pinned.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        max_bytes: int = MAX_KEPT_BYTES,
        max_age_s: float = MAX_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._tenants: dict[str, _OfTenant] = {}

    def find(self, tenant: str, response_id: str) -> Fingerprint | None:
        """Returns the fingerprint of a tenant's request by the id of its response; None if it is not kept. O(1)."""
        kept = self._tenants.get(tenant)
        return None if kept is None else kept.find(response_id, self._clock() - self._max_age_s)

    def keep(self, tenant: str, response_id: str, fingerprint: Fingerprint) -> None:
        """Keeps a fingerprint under a new id, unless it is larger than the limit. O(1), amortized."""
        kept = self._tenants.setdefault(tenant, _OfTenant())
        kept.keep(response_id, fingerprint, self._clock())
        kept.shrink(self._max_bytes)


class _OfTenant:
    """The fingerprints of one tenant with the times of their requests, the least recently used one first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Fingerprint, float]] = OrderedDict()
        self._n_bytes = 0

    def find(self, response_id: str, oldest: float) -> Fingerprint | None:
        """Returns a fingerprint that is not older than ``oldest``; drops an older one."""
        fingerprint, kept_at = self._kept.get(response_id, (None, 0.0))
        if fingerprint is None:
            return None
        if kept_at < oldest:
            del self._kept[response_id]
            self._n_bytes -= fingerprint.n_bytes
            return None
        self._kept.move_to_end(response_id)
        return fingerprint

    def keep(self, response_id: str, fingerprint: Fingerprint, now: float) -> None:
        """Adds a fingerprint."""
        self._kept[response_id] = fingerprint, now
        self._n_bytes += fingerprint.n_bytes

    def shrink(self, max_bytes: int) -> None:
        """Drops the least recently used ones until the others take at most ``max_bytes``."""
        while self._n_bytes > max_bytes:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._n_bytes -= dropped.n_bytes
