"""The waiting queue: which request is admitted next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from sortedcontainers import SortedDict

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request
from radixkv.settings.checks import MAX_PRIORITY
from radixkv.settings.config import SchedulePolicy

_MAX_ADMISSIONS_BEFORE_AGING = 64
"""After this many admissions the oldest waiting request gets the best priority of all that wait."""


class WaitingQueue:
    """Waiting requests, ordered by priority; within a priority oldest first (``fcfs``) or longest cached prefix
    first (``lpm``).

    Requests age, so that no priority makes others wait for ever: once in ``_MAX_ADMISSIONS_BEFORE_AGING``
    admissions, the oldest request gets the priority of the first in order, and keeps it.

    ``lpm`` ranks only the first ``window`` requests by priority and age. Within a priority, requests that were
    passed over ``max_passes`` times come before all others.
    """

    def __init__(self, cache: PageCache, *, policy: SchedulePolicy, window: int, max_passes: int) -> None:
        self._cache = cache
        self._policy = policy
        self.window = window
        """How many requests are ranked."""
        self._max_passes = max_passes
        self._in_order: SortedDict[tuple[int, int], Request] = SortedDict()
        self._by_length: SortedDict[tuple[int, int, int], Request] = SortedDict()
        self._unstarted: SortedDict[tuple[float, int], Request] = SortedDict()
        """By time of arrival: a request that the gate has held may be older than those before it."""
        self._n_admissions = 0
        """Admissions since a request last aged."""
        self.version = 0
        """Changes whenever a request is added or removed."""

    is_common = True

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order.values())

    def n_unstarted_beside(self, request: Request) -> int:
        """Requests that wait for their first step, whoever has sent ``request``; the others were preempted, or are
        forks. O(1)."""
        return len(self._unstarted)

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time, oldest first.

        O(1), and O(log n) a request.
        """
        taken: list[Request] = []
        while self._unstarted and self._unstarted.peekitem(0)[1].received_at < time_s:
            taken.append(self._unstarted.peekitem(0)[1])
            self.remove(taken[-1])
        return taken

    def add(self, request: Request) -> None:
        """Queues a request by its priority and age. O(log n + tokens)."""
        self.version += 1
        request.phase = Phase.WAITING
        request.key = bytes(request.lookup_key)
        self._in_order[request.order] = request
        self._by_length[request.priority, request.n_known, request.serial] = request
        if request.first_row is None:
            self._unstarted[request.received_at, request.serial] = request

    def remove(self, request: Request) -> None:
        """Removes a request. O(log n)."""
        self.version += 1
        request.key = b""
        del self._in_order[request.order]
        del self._by_length[request.priority, request.n_known, request.serial]
        self._unstarted.pop((request.received_at, request.serial), None)

    def candidates(self) -> Iterable[Request]:
        """Requests in the order in which to try to admit them, without those that are retried alone.

        ``lpm`` matches up to ``window`` prompts against the tree; a match is reused while the tree is unchanged.
        O(window), with ``lpm`` O(window · log window) and the matches.
        """
        window = list(self._first_in_order())
        if self._policy == "fcfs" or len(window) == 1:
            return window
        self._match(window)
        return sorted(window, key=self._rank)

    def next_requests(self) -> Iterator[Request]:
        """Yields requests that will read the cache, those first that are admitted first.

        These are at most ``window`` requests. ``lpm`` ranks them by the prefixes that it has found last. Changes
        nothing. O(window), with ``lpm`` O(window · log window).
        """
        window: Iterable[Request] = islice(self._in_order.values(), self.window)
        for request in window if self._policy == "fcfs" else sorted(window, key=self._rank):
            if request.reads_cache and not request.recovery.bypasses_tree:
                yield request

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> list[Request]:
        """Requests that have at most ``n_tokens`` to compute, oldest first, at most about twice ``window`` of them.

        All have the priority of the first request in order; none if one of the ``unfinished`` requests, which they
        are to overtake, has a better one. Finds any short prompt, and of long ones those in the window whose cached
        prefix leaves little to compute.

        O(unfinished + log n + window), and a match for each request in the window.
        """
        max_priority = min((request.priority for request in unfinished), default=MAX_PRIORITY)
        window = list(self._first_in_order())
        if not window or window[0].priority > max_priority:
            return []
        priority = window[0].priority
        self._match(window)
        found = {r for r in window if r.priority == priority and r.n_known - r.rank.n_matched <= n_tokens}
        lengths = self._by_length.irange((priority,), (priority, n_tokens + 1), inclusive=(True, False))
        found.update(islice((self._by_length[key] for key in lengths), self.window))
        return sorted(
            (request for request in found if not request.recovery.is_retried), key=lambda request: request.serial
        )

    def first(self, requests: Iterable[Request]) -> Request:
        """Returns which of some requests, at least one, goes first, whether they are in the queue or not.

        O(requests), with ``lpm`` a match for each.
        """
        ranked = list(requests)
        if self._policy == "fcfs":
            return min(ranked, key=lambda request: request.order)
        self._match(ranked)
        return min(ranked, key=self._rank)

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """Adds 1 to ``n_passed_over`` of each request in the window that is earlier in order than an admitted one.

        O(window); O(waiting) where a request ages.

        Args:
            admitted: the requests that a step admits, at least one.
        """
        last = max(request.order for request in admitted)
        for request in self._first_in_order():
            if request.order > last:
                break
            request.rank.n_passed_over += 1
        self._n_admissions += len(admitted)
        if self._n_admissions >= _MAX_ADMISSIONS_BEFORE_AGING:
            self._n_admissions = 0
            self._age()

    def charge(self, requests: Sequence[Request], n_tokens: int) -> None:
        """Does nothing: the order depends on no costs. O(1)."""

    def _first_in_order(self) -> Iterator[Request]:
        """Yields the first ``window`` requests by priority and age, without those that are retried alone."""
        return islice((one for one in self._in_order.values() if not one.recovery.is_retried), self.window)

    def _age(self) -> None:
        """Gives the oldest request and its followers the priority of the first request in order. O(waiting)."""
        oldest = min(self._in_order.values(), key=lambda request: request.serial, default=None)
        if oldest is None:
            return
        (best_priority, _), _ = self._in_order.peekitem(0)
        self.remove(oldest)
        for request in (oldest, *oldest.followers):
            request.order = best_priority, request.serial
        self.add(oldest)

    def _match(self, requests: Iterable[Request]) -> None:
        """Matches the requests against the tree, except those that were matched at its current version."""
        version = self._cache.tree.version
        stale = [request for request in requests if request.rank.match_version != version]
        matches = self._cache.matches((request.namespace, request.key) for request in stale)
        for request, n_matched in zip(stale, matches, strict=True):
            request.rank.n_matched = n_matched if request.reads_cache and not request.recovery.bypasses_tree else 0
            request.rank.match_version = version

    def _rank(self, request: Request) -> tuple[int, bool, int, int]:
        if request.rank.n_passed_over >= self._max_passes:
            return (request.priority, False, 0, request.serial)
        return (request.priority, True, -request.rank.n_matched, request.serial)
