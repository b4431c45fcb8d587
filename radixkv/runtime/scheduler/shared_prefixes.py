"""Which rows of a plan have pages in common, for attention to read those once."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import SharedRun
from radixkv.tree.node import Lease

MIN_TOKENS = 64
"""Shorter runs are left out: to read them once saves less than it costs to put the parts of attention together."""


class SharedPrefixes:
    """The shared runs of the rows that continue an answer, kept while the same requests do, in the same order.

    What was found stays true for as long: the pages of an open lease keep their places in its block table. A run
    that grows meanwhile, because two answers go on alike, is seen when the rows change.
    """

    def __init__(self, cache: PageCache, *, least_tokens: int = MIN_TOKENS) -> None:
        self._cache = cache
        self._least_pages = cache.pages_for(least_tokens)
        self._leases: list[Lease | None] = []
        self._runs: tuple[SharedRun, ...] = ()

    def find(self, requests: Sequence[Request]) -> tuple[SharedRun, ...]:
        """The runs of the requests' rows, which stand in a plan in this order.

        O(rows), and O(edges) where other requests have a row than in the last call.
        """
        leases = [request.blocks.lease for request in requests]
        if leases != self._leases:
            self._leases = leases
            self._runs = tuple(
                SharedRun(run.leases, run.first_page, run.n_pages)
                for run in self._cache.shared_runs(leases)
                if run.n_pages >= self._least_pages
            )
        return self._runs
