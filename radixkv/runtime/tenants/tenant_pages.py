"""The pages of a cache by tenant: how many each owns, may own, and is left by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixkv.errors import ConfigError, InvariantError
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.page_quotas import PageQuotas
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.evictable import OTHERS
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree


class TenantPages(PageQuotas):
    """Counts the pages of tenants with a share of them, and keeps their floors and caps.

    A tenant *owns* the pages that are cached in its namespaces, detached ones too, and those that are private to
    its block tables. It *holds* the part of them that cannot be evicted. If it holds fewer than its floor, the
    difference is *reserved*: others leave so many pages available, and evict only what exceeds its floor. It never
    owns more than its cap: its own pages are evicted first. Slots of recurrent states have the same shares, but
    that a cap is at least one slot.

    Args:
        tenants: all of them; those without a share of pages have neither floor nor cap.
    """

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._tenants = [one for one in tenants if one.has_page_share]
        self.names = tuple(one.name for one in self._tenants)
        self.n_owned = dict.fromkeys(self.names, 0)
        """Pages of each tenant with a share."""

    def open(self, tree: RadixTree, n_pages: int) -> None:
        """Begins to divide the pages of a cache, and its slots of recurrent states alike. O(tenants)."""
        self._tree = tree
        self.resize(n_pages)
        if (states := tree.states) is not None:
            floors = {one.name: one.min_pages(states.n_slots) for one in self._tenants}
            states.divide(floors, {one.name: max(1, one.max_pages(states.n_slots)) for one in self._tenants})

    def resize(self, n_pages: int) -> None:
        """Sets the number of pages of which the tenants have shares. O(tenants)."""
        floors = {one.name: one.min_pages(n_pages) for one in self._tenants}
        self._floors = {name: floor for name, floor in floors.items() if floor}
        self._caps = {one.name: one.max_pages(n_pages) for one in self._tenants}

    def add(self, namespace: Namespace, n_pages: int) -> None:
        """Counts pages that a tenant owns in addition; a negative number of those that are freed. O(1)."""
        if namespace.tenant in self.n_owned:
            self.n_owned[namespace.tenant] += n_pages

    def n_held(self, tenant: str) -> int:
        """Returns how many pages a tenant with a share owns that cannot be evicted. O(1)."""
        return self.n_owned[tenant] - self._tree.n_pages_evictable_by_group[tenant]

    def n_reserved(self, tenant: str) -> int:
        """Returns how many pages a tenant holds less than its floor. O(1)."""
        floor = self._floors.get(tenant, 0)
        return max(0, floor - self.n_held(tenant)) if floor else 0

    def n_reserved_beside(self, tenant: str) -> int:
        """Returns how many pages all others hold less than their floors. O(tenants)."""
        n_reserved, n_owned, n_evictable = 0, self.n_owned, self._tree.n_pages_evictable_by_group
        for name, floor in self._floors.items():
            n_below_floor = floor - n_owned[name] + n_evictable[name]
            if n_below_floor > 0 and name != tenant:
                n_reserved += n_below_floor
        return n_reserved

    def has_more_than_floor(self, tenant: str) -> bool:
        """Returns whether others could use pages that the tenant gives up: it has no floor, or holds more. O(1)."""
        floor = self._floors.get(tenant, 0)
        return not floor or self.n_held(tenant) > floor

    def n_below_cap(self, tenant: str) -> int | None:
        """Returns how many pages a tenant may hold in addition; None without a share. O(1)."""
        cap = self._caps.get(tenant)
        return None if cap is None else cap - self.n_held(tenant)

    def n_available(self, namespace: Namespace, n_available: int) -> int:
        """Returns how many of the free and evictable pages a tenant can get, negative if others lack reserved ones.

        O(tenants with a share).
        """
        if not self.names:
            return n_available
        n_pages = n_available - self.n_reserved_beside(namespace.tenant)
        n_below_cap = self.n_below_cap(namespace.tenant)
        return n_pages if n_below_cap is None else min(n_pages, n_below_cap)

    def is_capped(self, tenant: str, n_available: int) -> bool:
        """Returns whether a tenant's cap, and not what others hold, limits what it can get. O(tenants).

        Args:
            tenant: the tenant.
            n_available: free and evictable pages.
        """
        n_below_cap = self.n_below_cap(tenant)
        return n_below_cap is not None and n_below_cap < n_available - self.n_reserved_beside(tenant)

    def have_room(self, block_tables: Sequence[BlockTable], n_available: int) -> bool:
        """Returns whether each block table can get one page more, all together. O(block tables + tenants)."""
        n_needed = Counter(blocks.namespace.tenant for blocks in block_tables)
        for tenant, n_pages in n_needed.items():
            n_below = self.n_below_cap(tenant)
            if n_below is not None and n_pages > n_below:
                return False
        n_reserved = sum(max(0, self.n_reserved(name) - n_needed[name]) for name in self._floors)
        return n_needed.total() + n_reserved <= n_available

    def n_over_cap(self, namespace: Namespace, n_pages: int) -> int:
        """Returns how many pages a tenant must evict of its own before it gets ``n_pages`` more. O(1)."""
        cap = self._caps.get(namespace.tenant)
        return 0 if cap is None else max(0, self.n_owned[namespace.tenant] + n_pages - cap)

    def quotas(self, namespace: Namespace) -> dict[str, int] | None:
        """Returns how many pages of each tenant may be evicted for one of them; None without shares. O(tenants)."""
        if not self.names:
            return None
        n_evictable = self._tree.n_pages_evictable_by_group
        n_others = self._tree.n_pages_evictable - sum(n_evictable.values())
        n_left = {name: 0 if name == namespace.tenant else self.n_reserved(name) for name in n_evictable}
        return {name: max(0, n_pages - n_left[name]) for name, n_pages in n_evictable.items()} | {OTHERS: n_others}

    def check(self, n_private: Counter[Namespace]) -> None:
        """Recounts what each tenant with a share owns. O(nodes of the tree). Raises ``InvariantError``."""
        counted: Counter[str] = self._tree.pages_by_group()
        for namespace, n_pages in n_private.items():
            counted[namespace.tenant] += n_pages
        n_owned = {name: counted[name] for name in self.n_owned}
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
