"""The waiting queue of a server with tenants: whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TypeAlias

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.row_shares import RowShares
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.tenants import TenantConfig

_MIN_WINDOW = 4
"""Fewest requests of a tenant that are ranked, however many tenants wait."""
_QUANTUM_TOKENS = 16
"""Tokens that the tenant with the largest weight gets in a round; the others get less, in proportion."""


class FairQueue:
    """A waiting queue for each tenant, among which a deficit round robin chooses.

    Each tenant has a *deficit*: the tokens that a step may still compute for it in this round. Every computed token
    of its requests is subtracted, those of prompts and those of answers, and may make it negative. Tenants with a
    deficit above 0 are served in turn. When none of those who could be served has one, a round begins, which adds
    to each deficit in proportion to the tenant's weight; so while tenants wait for each other, they get tokens in
    proportion to their weights. The rounds of others pay back what a tenant without waiting requests owes, but it
    saves nothing up. While nobody waits, nobody owes anything.

    Args:
        tenants: all of them.
        open_queue: makes the queue of one tenant, which has the order within it.
        rows: of the tenants; those who may not have one more wait.
        window: how many requests are ranked in all; the tenants that wait have equal parts of it.
    """

    def __init__(
        self, tenants: Sequence[TenantConfig], open_queue: Callable[[], WaitingQueue], rows: RowShares, window: int
    ) -> None:
        self._queues = {tenant.name: open_queue() for tenant in tenants}
        max_weight = max(tenant.weight for tenant in tenants)
        self._quanta = {tenant.name: _QUANTUM_TOKENS * tenant.weight / max_weight for tenant in tenants}
        self._rows = rows
        self._window = window
        self._turns: dict[str, None] = {}
        """The tenants with waiting requests, the next one first."""
        self._deficits: dict[str, float] = {}
        """Tenants without one have 0."""
        self.n_computed = dict.fromkeys(self._queues, 0)
        """Tokens that steps have computed for each tenant since the start."""

    def __len__(self) -> int:
        return sum(len(self._queues[name]) for name in self._turns)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(chain(*self._queues.values()), key=lambda request: request.order))

    @property
    def version(self) -> int:
        """Changes whenever a request is added or removed. O(tenants)."""
        return sum(queue.version for queue in self._queues.values())

    def n_unstarted_beside(self, request: Request) -> int:
        """Requests of the same tenant that wait for their first step. O(1)."""
        return self._queues[request.tenant].n_unstarted

    def n_waiting(self, tenant: str) -> int:
        """Requests of a tenant. O(1)."""
        return len(self._queues[tenant])

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time, oldest first.

        O(tenants), and O(log n) a request.
        """
        taken = [one for name in list(self._turns) for one in self._queues[name].take_received_before(time_s)]
        for name in [name for name in self._turns if not self._queues[name]]:
            self._leave(name)
        return sorted(taken, key=lambda request: request.received_at)

    def add(self, request: Request) -> None:
        """Queues a request behind its tenant's others. O(log n + tokens)."""
        if not self._turns:
            self._deficits.clear()
        self._turns.setdefault(request.tenant)
        self._queues[request.tenant].add(request)

    def remove(self, request: Request) -> None:
        """Removes a request. O(log n)."""
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            self._leave(request.tenant)

    def charge(self, tenant: str, n_tokens: int) -> None:
        """Counts tokens that a step computes for a tenant. O(1)."""
        self.n_computed[tenant] += n_tokens
        if self._turns:
            self._deficits[tenant] = deficit = self._deficit(tenant) - n_tokens
            if deficit <= 0 and tenant in self._turns:
                self._to_the_end(tenant)

    def candidates(self) -> Iterator[Request]:
        """Yields requests in the order in which to try to admit them, without those that are retried alone.

        The cost is that of ``WaitingQueue.candidates`` for each tenant whose turn it is, and O(tenants) a request.
        """
        return self._in_turn(lambda tenant: self._queues[tenant].candidates())

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterator[Request]:
        """Yields requests that may overtake ``unfinished`` prompts, by ``WaitingQueue.short`` of each tenant.

        The tenants of those prompts have turns, too, in which nobody overtakes them. A priority counts only within
        a tenant. O(tenants) a request, and ``WaitingQueue.short`` for each tenant whose turn it is.
        """
        tenants = {request.tenant for request in unfinished}
        return self._in_turn(
            lambda tenant: self._queues[tenant].short(
                n_tokens, [one for one in unfinished if one.tenant == tenant]
            ),
            tenants,
        )

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """Does what ``WaitingQueue.count_passes`` does, within each tenant."""
        for tenant in {request.tenant for request in admitted}:
            self._queues[tenant].count_passes([one for one in admitted if one.tenant == tenant])

    def _in_turn(
        self, in_order: Callable[[str], Iterable[Request]], prefilling: Collection[str] = ()
    ) -> Iterator[Request]:
        """Yields requests of the tenants in turn, each tenant's by ``in_order``.

        It looks at each of them after it was tried: one that still waits was refused, and with it those of its
        tenant that are behind it.
        """
        refused: set[str] = set()
        ordered: dict[str, Iterator[Request]] = {}
        while (tenant := self._next(refused, prefilling)) is not None:
            if tenant not in ordered:
                self._queues[tenant].window = max(_MIN_WINDOW, self._window // len(self._turns))
                ordered[tenant] = iter(in_order(tenant))
            request = next(ordered[tenant], None)
            if request is None:
                refused.add(tenant)
            elif _waits(request):  # it may have overtaken another one
                yield request
                if _waits(request):
                    refused.add(tenant)
                elif request.phase is Phase.LOADING and tenant in self._turns:
                    self._to_the_end(tenant)  # it pays when it is admitted; until then others have their turn

    def _next(self, refused: Collection[str], prefilling: Collection[str]) -> str | None:
        """Returns whose turn it is, and begins rounds if need be. O(tenants).

        None if no tenant that was not refused may have a row, or if the turn is that of one of ``prefilling``.
        """
        able = [tenant for tenant in self._turns if tenant not in refused and self._rows.may_take(tenant)]
        if not able:
            return None
        while all(self._deficit(tenant) <= 0 for tenant in (*able, *prefilling)):  # twice where it rounds to 0
            self._begin_rounds({*able, *prefilling})
        return next((tenant for tenant in able if self._deficit(tenant) > 0), None)

    def _begin_rounds(self, able: AbstractSet[str]) -> None:
        """Begins as many rounds as it takes until one of the tenants that can be served has a deficit above 0."""
        n_rounds = 1 + min(-self._deficit(tenant) // self._quanta[tenant] for tenant in able)
        for tenant in able:
            self._deficits[tenant] = self._deficit(tenant) + n_rounds * self._quanta[tenant]
        for tenant in self._deficits.keys() - able:
            if (deficit := self._deficits[tenant]) < 0:
                self._deficits[tenant] = min(0.0, deficit + n_rounds * self._quanta[tenant])

    def _deficit(self, tenant: str) -> float:
        return self._deficits.get(tenant, 0.0)

    def _leave(self, tenant: str) -> None:
        del self._turns[tenant]
        if self._deficit(tenant) > 0:
            del self._deficits[tenant]

    def _to_the_end(self, tenant: str) -> None:
        del self._turns[tenant]
        self._turns[tenant] = None


def _waits(request: Request) -> bool:
    return request.phase is Phase.WAITING and request.block_table is None


Queue: TypeAlias = WaitingQueue | FairQueue
"""The waiting queue, without or with tenants."""
