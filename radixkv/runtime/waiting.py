"""The waiting requests, and who is admitted next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from sortedcontainers import SortedDict

from radixkv.config import SchedulePolicy
from radixkv.runtime.cache import PageCache
from radixkv.runtime.request import Request


class WaitingQueue:
    """Requests by order of arrival, offered oldest first (``fcfs``) or longest cached prefix first (``lpm``).

    ``lpm`` ranks the ``window`` oldest; of these, one that was passed over ``max_passes`` times goes first.
    """

    def __init__(self, cache: PageCache, *, policy: SchedulePolicy, window: int, max_passes: int) -> None:
        self._cache = cache
        self._policy = policy
        self._window = window
        self._max_passes = max_passes
        self._by_serial: SortedDict[int, Request] = SortedDict()

    def __len__(self) -> int:
        return len(self._by_serial)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_serial.values())

    def add(self, request: Request) -> None:
        """Queues a request at its serial. O(log n + tokens)."""
        request.key = bytes(request.tokens)
        self._by_serial[request.serial] = request

    def remove(self, request: Request) -> None:
        """Takes a request out. O(log n)."""
        request.key = b""
        del self._by_serial[request.serial]

    def candidates(self) -> Iterable[Request]:
        """Requests in the order in which to try them. ``lpm``: O(window) matches, less those still known."""
        window = list(islice(self._by_serial.values(), self._window))
        if self._policy == "fcfs" or len(window) == 1:
            return window
        version = self._cache.tree.version
        unknown = [request for request in window if request.match_version != version]
        matches = self._cache.matches((request.namespace, request.key) for request in unknown)
        for request, n_matched in zip(unknown, matches, strict=True):
            request.n_matched = n_matched if request.reads_cache and not request.private else 0
            request.match_version = version
        return sorted(window, key=self._rank)

    def count_passes(self, admitted: Iterable[Request]) -> None:
        """Notes whom a step's admissions passed over: the older of the window. O(window)."""
        youngest = max((request.serial for request in admitted), default=-1)
        for request in islice(self._by_serial.values(), self._window):
            if request.serial > youngest:
                break
            request.n_passed += 1

    def _rank(self, request: Request) -> tuple[bool, int, int]:
        if request.n_passed >= self._max_passes:
            return (False, 0, request.serial)
        return (True, -request.n_matched, request.serial)
