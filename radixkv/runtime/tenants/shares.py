"""What each tenant has of the device: floors and caps of rows and pages, and who gives when pages run out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.shares import Shares
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.tenants.fair_queue import FairQueue
from radixkv.runtime.tenants.row_shares import RowShares
from radixkv.runtime.tenants.tenant_pages import TenantPages
from radixkv.settings.tenants import OPERATOR, TenantConfig
from radixkv.wire.stats import TenantStats


class TenantShares(Shares):
    """Divides batch slots and pages among tenants.

    Pages belong to the tenant of a namespace, and batch slots to the sender. For a tenant with a share of pages
    both are the same: ``settings/tenants.py`` lets only ``cache_salt="tenant"`` have one.

    Args:
        rows: of the tenants.
        pages: of the device's page cache.
        cache: the device's page cache.
        queue: the waiting requests.
    """

    def __init__(self, rows: RowShares, pages: TenantPages, cache: PageCache, queue: FairQueue) -> None:
        self.rows = rows
        self.queue = queue
        self._pages = pages
        self._cache = cache

    def may_take_batch_slot(self, request: Request) -> bool:
        """Returns whether a request's tenant may have one batch slot more. O(1)."""
        return self.rows.may_take(request.sender)

    def take_batch_slot(self, request: Request) -> None:
        """Counts a batch slot that a request gets. O(1)."""
        self.rows.take(request.sender)

    def give_batch_slot_back(self, request: Request) -> None:
        """Counts a batch slot that a request no longer has. O(1)."""
        self.rows.give_back(request.sender)

    def is_of_same(self, one: Request, other: Request) -> bool:
        """Returns whether two requests are of one tenant. O(1)."""
        return one.sender == other.sender

    def is_ahead(self, one: Request, other: Request) -> bool:
        """Returns whether ``one`` keeps its pages free of ``other``, as all prompts of other tenants do. O(1)."""
        return one.sender != other.sender or one.order < other.order

    def n_reserved(self, request: Request) -> int:
        """Returns how many pages the owner of a request's namespace holds less than its floor. O(1)."""
        return self._pages.n_reserved(request.namespace.tenant)

    def n_reserved_beside(self, request: Request) -> int:
        """Returns how many pages all others hold less than their floors. O(tenants)."""
        return self._pages.n_reserved_beside(request.namespace.tenant)

    def is_capped(self, request: Request) -> bool:
        """Returns whether its cap limits the pages that the owner of a request's namespace can get. O(tenants)."""
        return self._pages.is_capped(request.namespace.tenant, self._cache.n_available)

    def may_give(self, request: Request) -> Callable[[Request], bool]:
        """Returns a function that says whether ``request`` could use the pages of another request. O(tenants)."""
        own, is_capped = request.namespace.tenant, self.is_capped(request)

        def may_give(other: Request) -> bool:
            tenant = other.namespace.tenant
            return tenant == own or (not is_capped and self._pages.has_more_than_floor(tenant))

        return may_give

    def victims(self, candidates: Sequence[Request]) -> list[Request]:
        """Returns the candidates of the tenant with the most of them; with the youngest one, of equals.

        O(candidates).
        """
        n_rows = Counter(one.sender for one in candidates)
        tenant = max(candidates, key=lambda one: (n_rows[one.sender], one.serial)).sender
        return [one for one in candidates if one.sender == tenant]

    def stuck(self, running: Iterable[Request]) -> Iterator[list[Request]]:
        """Yields the paused requests of each tenant that has no other batch slots, while more of its requests wait.

        O(running).
        """
        paused: dict[str, list[Request]] = {}
        for request in running:
            if request.is_paused:
                paused.setdefault(request.sender, []).append(request)
        for tenant, requests in paused.items():
            if len(requests) == self.rows.n_rows(tenant) and self.queue.n_waiting(tenant):
                yield requests

    def count(self, sender: str) -> tuple[int, int]:
        """Returns how many batch slots a tenant has, and how many of its requests are in the queue. O(1)."""
        return self.rows.n_rows(sender), self.queue.n_waiting(sender)

    def stats(self, count_of: Callable[[str], tuple[int, int]]) -> dict[str, TenantStats]:
        """Returns counters and gauges of all tenants but the operator. O(tenants), and the calls.

        Args:
            count_of: returns how many requests of a tenant run, and how many wait.
        """
        return {
            tenant: TenantStats(
                *count_of(tenant), computed_tokens_total=n_tokens, n_pages=self._pages.n_owned.get(tenant)
            )
            for tenant, n_tokens in self.queue.n_computed.items()
            if tenant != OPERATOR
        }


def open_shares(
    cache: PageCache,
    tenants: Sequence[TenantConfig],
    n_rows: int,
    open_queue: Callable[[], WaitingQueue],
    window: int,
) -> tuple[TenantShares, FairQueue]:
    """Returns what divides a device among tenants, and their queue. O(tenants).

    Args:
        cache: the device's page cache, with the tenants' ``TenantPages``.
        tenants: all of them.
        n_rows: maximum rows of a step.
        open_queue: makes the queue of one tenant.
        window: how many requests are ranked in all.
    """
    assert isinstance(cache.page_quotas, TenantPages), "a cache of tenants divides its pages among them"
    rows = RowShares(tenants, n_rows)
    queue = FairQueue(tenants, open_queue, rows, window)
    return TenantShares(rows, cache.page_quotas, cache, queue), queue
