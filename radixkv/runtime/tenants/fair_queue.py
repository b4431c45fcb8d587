"""The waiting queue of a server with tenants: whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, count, islice, zip_longest
from math import inf
from typing import NamedTuple

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.tenants.row_shares import RowShares
from radixkv.settings.tenants import TenantConfig

_MIN_WINDOW = 4
"""Fewest requests of a tenant that are ranked, however many tenants wait."""
QUANTUM_TOKENS = 16
"""Tokens that the tenant with the largest weight gets in a round; the others get less, in proportion."""


class _Account(NamedTuple):
    """What a tenant may still compute, or owes."""

    deficit: float
    """Tokens."""
    since: int
    """The round for which ``deficit`` holds."""


class FairQueue:
    """A waiting queue for each tenant, among which a deficit round robin chooses.

    Each tenant has a *deficit*: the tokens that a step may still compute for it in this round. Every computed token
    of its requests is subtracted, those of prompts and those of answers, and may make it negative. Tenants with a
    deficit above 0 are served in turn. When none of those who could be served has one, a round begins, which adds
    to each deficit in proportion to the tenant's weight; so while tenants wait for each other, they get tokens in
    proportion to their weights. The rounds of others pay back what a tenant without waiting requests owes, but it
    saves nothing up. While nobody waits, nobody owes anything.

    Rounds are only counted. What they add to a deficit is computed when it is asked for, so any number of rounds
    costs the same.

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
        self._quanta = {tenant.name: QUANTUM_TOKENS * tenant.weight / max_weight for tenant in tenants}
        self._rows = rows
        self._window = window
        self._turns: dict[str, None] = {}
        """The tenants with waiting requests, the next one first."""
        self._round = 0
        """Rounds that have begun."""
        self._accounts: dict[str, _Account] = {}
        """Tenants without one have a deficit of 0. All tenants with waiting requests have one."""
        self.n_computed = dict.fromkeys(self._queues, 0)
        """Tokens that steps have computed for each tenant since the start."""

    is_common = False

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
        return self._queues[request.sender].n_unstarted_beside(request)

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
        """Queues a request in its tenant's order. O(log n + tokens)."""
        if not self._turns:
            self._accounts.clear()
        if request.sender not in self._turns:
            self._accounts[request.sender] = _Account(self._deficit(request.sender), self._round)
            self._turns[request.sender] = None
        self._queues[request.sender].add(request)

    def remove(self, request: Request) -> None:
        """Removes a request. O(log n)."""
        queue = self._queues[request.sender]
        queue.remove(request)
        if not queue:
            self._leave(request.sender)

    def charge(self, requests: Sequence[Request], n_tokens: int) -> None:
        """Counts that a step computes ``n_tokens`` tokens for each of these requests. O(requests)."""
        for tenant, n_requests in Counter(request.sender for request in requests).items():
            self._charge(tenant, n_requests * n_tokens)

    def _charge(self, tenant: str, n_tokens: int) -> None:
        self.n_computed[tenant] += n_tokens
        if self._turns:
            deficit = self._deficit(tenant) - n_tokens
            self._accounts[tenant] = _Account(deficit, self._round)
            if deficit <= 0 and tenant in self._turns:
                self._to_the_end(tenant)

    def candidates(self) -> Iterator[Request]:
        """Yields requests in the order in which to try to admit them, without those that are retried alone.

        The cost is that of ``WaitingQueue.candidates`` for each tenant whose turn it is, O(tenants) once, and
        O(log tenants) a request.
        """
        return self._in_turn(lambda tenant: self._queues[tenant].candidates())

    def next_requests(self) -> Iterator[Request]:
        """Yields what ``WaitingQueue.next_requests`` does, of each tenant in turn, at most ``window`` of them."""
        in_turn = zip_longest(*(self._queues[name].next_requests() for name in self._turns))
        return islice(
            (request for requests in in_turn for request in requests if request is not None), self._window
        )

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterator[Request]:
        """Yields requests that may overtake ``unfinished`` prompts, by ``WaitingQueue.short`` of each tenant.

        The tenants of those prompts have turns, too, in which nobody overtakes them. A priority counts only within
        a tenant. At most ``window / 4`` tenants are asked, so that ``window`` requests are ranked.

        O(tenants) once, O(log tenants + prefilling tenants) a request, and ``WaitingQueue.short`` for each tenant
        whose turn it is.
        """
        tenants = {request.sender for request in unfinished}
        return self._in_turn(
            lambda tenant: self._queues[tenant].short(
                n_tokens, [one for one in unfinished if one.sender == tenant]
            ),
            tenants,
            max(1, self._window // _MIN_WINDOW),
        )

    def first(self, requests: Iterable[Request]) -> Request:
        """Returns which of some requests, at least one, goes first within a tenant. See ``WaitingQueue.first``."""
        ranked = list(requests)
        return self._queues[ranked[0].sender].first(ranked)

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """Does what ``WaitingQueue.count_passes`` does, within each tenant."""
        for tenant in {request.sender for request in admitted}:
            self._queues[tenant].count_passes([one for one in admitted if one.sender == tenant])

    def _in_turn(
        self,
        in_order: Callable[[str], Iterable[Request]],
        prefilling: Collection[str] = (),
        max_asked: float = inf,
    ) -> Iterator[Request]:
        """Yields requests of at most ``max_asked`` tenants in turn, each tenant's by ``in_order``.

        If a request still waits after it was yielded, it was refused, and its tenant's other requests are not
        tried.
        """
        for name in prefilling:
            self._accounts.setdefault(name, _Account(0.0, self._round))
        # The round in which each tenant can be served, and its place in that round; the next one first.
        turns = [(self._served_in(name), place, name) for place, name in enumerate(self._turns)]
        heapify(turns)
        places = count(len(turns))
        ordered: dict[str, Iterator[Request]] = {}
        while turns:
            served_in, _, tenant = turns[0]
            if tenant not in self._turns or not self._rows.may_take(tenant):
                heappop(turns)
                continue
            if self._served_in(tenant) > served_in:  # it has been charged
                heapreplace(turns, (self._served_in(tenant), next(places), tenant))
                continue
            own = min(map(self._served_in, prefilling), default=served_in)
            self._round = max(self._round, min(own, served_in))
            for name in prefilling:
                if self._served_in(name) <= self._round:
                    self._accounts[name] = _Account(self._deficit(name, is_served=True), self._round)
            if served_in > self._round:
                return  # first it is the turn of a prefilling tenant
            if tenant not in ordered:
                if len(ordered) == max_asked:
                    return
                self._queues[tenant].window = max(_MIN_WINDOW, self._window // len(self._turns))
                ordered[tenant] = iter(in_order(tenant))
            request = next(ordered[tenant], None)
            if request is None:
                heappop(turns)
            elif _waits(request):  # it may have overtaken another one
                yield request
                if _waits(request):
                    heappop(turns)
                elif request.phase is Phase.LOADING and tenant in self._turns:
                    # It pays when it is admitted; until then others have their turn.
                    self._to_the_end(tenant)
                    heapreplace(turns, (self._round, next(places), tenant))

    def _served_in(self, tenant: str) -> int:
        """Returns the first round in which a tenant can be served, if its requests wait until then. O(1)."""
        deficit, since = self._accounts.get(tenant, (0.0, self._round))
        return since if deficit > 0 else since + 1 + int(-deficit // self._quanta[tenant])

    def _deficit(self, tenant: str, *, is_served: bool = False) -> float:
        """Returns a tenant's deficit now. O(1).

        Rounds add to it until it is above 0, or until it is 0 for a tenant that has no waiting requests and is not
        served either.
        """
        deficit, since = self._accounts.get(tenant, (0.0, self._round))
        if deficit > 0 or since == self._round:
            return deficit
        n_rounds = min(self._round, self._served_in(tenant)) - since
        deficit += n_rounds * self._quanta[tenant]
        return deficit if is_served or tenant in self._turns else min(0.0, deficit)

    def _leave(self, tenant: str) -> None:
        deficit = self._deficit(tenant)
        del self._turns[tenant]
        self._accounts[tenant] = _Account(min(0.0, deficit), self._round)

    def _to_the_end(self, tenant: str) -> None:
        del self._turns[tenant]
        self._turns[tenant] = None


def _waits(request: Request) -> bool:
    return request.phase is Phase.WAITING and request.block_table is None
