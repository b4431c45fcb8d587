"""The pages of a cache by tenant: how many each owns, may own, and is left by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from radixkv.errors import ConfigError, InvariantError
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.evictable import OTHERS
from radixkv.tree.radix_tree import RadixTree


class TenantPages:
    """Counts the pages of tenants with a share of them, and keeps their floors and caps.

    A tenant *owns* the pages that are cached in its namespaces, detached ones too, and those that are private to
    its block tables. It *holds* those of them that cannot be evicted. If it holds fewer pages than its floor, the
    difference is *reserved*: others leave so many pages available, and evict only those of its pages that exceed
    the floor. It never owns more than its cap: its own pages are evicted first.

    Args:
        tenants: all of them; those without a share of pages have neither floor nor cap.
        n_pages: pages of the cache.
        tree: of the cache, which counts the evictable pages of those with a share apart.
    """

    def __init__(self, tenants: Sequence[TenantConfig], n_pages: int, tree: RadixTree) -> None:
        self._tenants = [one for one in tenants if one.has_page_share]
        self._tree = tree
        self.n_owned = {one.name: 0 for one in self._tenants}
        """Pages of each tenant with a share."""
        self.resize(n_pages)

    def resize(self, n_pages: int) -> None:
        """Sets the number of pages of which the tenants have shares. O(tenants)."""
        floors = {one.name: one.min_pages(n_pages) for one in self._tenants}
        self._floors = {name: floor for name, floor in floors.items() if floor}
        self._caps = {one.name: one.max_pages(n_pages) for one in self._tenants}

    def add(self, tenant: str, n_pages: int) -> None:
        """Counts pages that a tenant owns in addition; a negative number of those that are freed. O(1)."""
        if tenant in self.n_owned:
            self.n_owned[tenant] += n_pages

    def n_held(self, tenant: str) -> int:
        """Returns how many pages a tenant with a share owns that cannot be evicted. O(1)."""
        return self.n_owned[tenant] - self._tree.n_pages_evictable_by_tenant[tenant]

    def n_reserved(self, tenant: str) -> int:
        """Returns how many pages a tenant holds less than its floor. O(1)."""
        floor = self._floors.get(tenant, 0)
        return max(0, floor - self.n_held(tenant)) if floor else 0

    def n_reserved_beside(self, tenant: str) -> int:
        """Returns how many pages all others hold less than their floors. O(tenants)."""
        n_reserved, n_owned, n_evictable = 0, self.n_owned, self._tree.n_pages_evictable_by_tenant
        for name, floor in self._floors.items():
            n_below_floor = floor - n_owned[name] + n_evictable[name]
            if n_below_floor > 0 and name != tenant:
                n_reserved += n_below_floor
        return n_reserved

    def has_more_than_floor(self, tenant: str) -> bool:
        """Returns whether others would have more pages if the tenant held fewer. O(1)."""
        floor = self._floors.get(tenant, 0)
        return not floor or self.n_held(tenant) > floor

    def n_below_cap(self, tenant: str) -> int | None:
        """Returns how many pages a tenant may hold in addition; None without a share. O(1)."""
        cap = self._caps.get(tenant)
        return None if cap is None else cap - self.n_held(tenant)

    def n_available(self, tenant: str, n_available: int) -> int:
        """Returns how many of the free and evictable pages a tenant can get. O(tenants)."""
        n_pages = n_available - self.n_reserved_beside(tenant)
        n_below_cap = self.n_below_cap(tenant)
        return n_pages if n_below_cap is None else min(n_pages, n_below_cap)

    def is_capped(self, tenant: str, n_available: int) -> bool:
        """Returns whether a tenant's cap, and not what others hold, limits what it can get. O(tenants).

        Args:
            tenant: the tenant.
            n_available: free and evictable pages.
        """
        n_below_cap = self.n_below_cap(tenant)
        return n_below_cap is not None and n_below_cap < n_available - self.n_reserved_beside(tenant)

    def have_room(self, n_needed: Mapping[str, int], n_available: int) -> bool:
        """Returns whether each tenant can get so many pages, all together. O(tenants).

        Args:
            n_needed: pages by tenant.
            n_available: free and evictable pages.
        """
        for tenant, n_pages in n_needed.items():
            n_below = self.n_below_cap(tenant)
            if n_below is not None and n_pages > n_below:
                return False
        n_reserved = sum(max(0, self.n_reserved(name) - n_needed.get(name, 0)) for name in self._floors)
        return sum(n_needed.values()) + n_reserved <= n_available

    def n_over_cap(self, tenant: str, n_pages: int) -> int:
        """Returns how many pages a tenant must evict of its own before it gets ``n_pages`` more. O(1)."""
        cap = self._caps.get(tenant)
        return 0 if cap is None else max(0, self.n_owned[tenant] + n_pages - cap)

    def quotas(self, tenant: str) -> dict[str, int]:
        """Returns how many pages of each tenant may be evicted for one of them. O(tenants)."""
        n_evictable = self._tree.n_pages_evictable_by_tenant
        n_others = self._tree.n_pages_evictable - sum(n_evictable.values())
        spared = {name: 0 if name == tenant else self.n_reserved(name) for name in n_evictable}
        return {name: max(0, n_pages - spared[name]) for name, n_pages in n_evictable.items()} | {OTHERS: n_others}

    def check(self, n_private: Counter[str]) -> None:
        """Recounts what each tenant with a share owns. O(nodes of the tree).

        Args:
            n_private: private pages of all block tables, by tenant.

        Raises:
            InvariantError: a bug in radixkv.
        """
        in_tree = self._tree.pages_by_tenant()
        n_owned = {name: in_tree[name] + n_private[name] for name in self.n_owned}
        if n_owned != self.n_owned:
            raise InvariantError(f"tenants own {n_owned} pages, but {self.n_owned} were counted")
        for name, cap in self._caps.items():
            if self.n_owned[name] > cap:
                raise InvariantError(f"tenant {name!r} owns {self.n_owned[name]} pages, more than its cap of {cap}")


def check_longest_request(tenants: Sequence[TenantConfig], n_pages: int, n_longest: int, page_size: int) -> None:
    """Refuses shares with which a tenant could not have the pages of the longest request.

    Args:
        tenants: all of them.
        n_pages: pages of the pool.
        n_longest: pages of the longest request.
        page_size: tokens of a page.

    Raises:
        ConfigError: names the tenant, and how long requests may be with these shares.
    """
    n_floors = sum(tenant.min_pages(n_pages) for tenant in tenants)
    for tenant in tenants:
        n_most = min(n_pages - n_floors + tenant.min_pages(n_pages), tenant.max_pages(n_pages))
        if n_most < n_longest:
            shorter = f", or set max_model_len to {n_most * page_size} or less" if n_most > 0 else ""
            raise ConfigError(
                f"{tenant.title} may have {n_most} of the {n_pages} pages, and the longest request needs "
                f"{n_longest}: raise its max_page_share or lower the min_page_share of others{shorter}"
            )
