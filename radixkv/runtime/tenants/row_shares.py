"""The rows of a step by tenant: how many each has, and may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixkv.settings.tenants import TenantConfig


class RowShares:
    """Counts the rows that requests have, and keeps floors and caps of tenants. O(1) each.

    A tenant's floor is kept free of others, whether it is used or not. Nobody is preempted for a row.

    Args:
        tenants: with their shares; requests of others have neither floor nor cap.
        n_rows: maximum rows of a step.
    """

    def __init__(self, tenants: Sequence[TenantConfig], n_rows: int) -> None:
        self._n_free = n_rows
        self._n_rows: Counter[str] = Counter()
        self._floors = {one.name: one.min_rows(n_rows) for one in tenants}
        self._caps = {one.name: one.max_rows(n_rows) for one in tenants}
        self._n_reserved = sum(self._floors.values())
        """Rows that are kept free: the sum of the rows that tenants lack to their floors."""

    def n_rows(self, tenant: str) -> int:
        """Returns how many rows a tenant has."""
        return self._n_rows[tenant]

    def may_take(self, tenant: str) -> bool:
        """Returns whether a tenant may have one row more."""
        n_own = self._n_rows[tenant]
        if tenant in self._caps and n_own >= self._caps[tenant]:
            return False
        return self._n_free > self._n_reserved - max(0, self._floors.get(tenant, 0) - n_own)

    def take(self, tenant: str) -> None:
        """Counts a row more."""
        if self._n_rows[tenant] < self._floors.get(tenant, 0):
            self._n_reserved -= 1
        self._n_rows[tenant] += 1
        self._n_free -= 1

    def give_back(self, tenant: str) -> None:
        """Counts a row less."""
        self._n_rows[tenant] -= 1
        self._n_free += 1
        if self._n_rows[tenant] < self._floors.get(tenant, 0):
            self._n_reserved += 1
