"""The pages that rows of a plan have in common, which attention then reads once."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import SharedRun
from radixkv.tree.node import Lease

MIN_SHARED_TOKENS = 64
"""Runs of fewer tokens are not listed: merging partial attention results costs more than reading pages once
saves."""


class SharedPrefixes:
    """Finds the shared runs of decode rows; caches them while the same requests decode in the same order.

    A run stays valid while its leases are open: the pages of an open lease keep their indices in its block table. A
    run that grows meanwhile, because two outputs continue with the same tokens, is noticed when the rows next
    change.
    """

    def __init__(self, cache: PageCache, *, min_tokens: int = MIN_SHARED_TOKENS) -> None:
        self._cache = cache
        self._min_pages = cache.pages_for(min_tokens)
        self._leases: list[Lease | None] = []
        self._runs: tuple[SharedRun, ...] = ()
        self._runs_id = 0

    def find(self, requests: Sequence[Request]) -> tuple[tuple[SharedRun, ...], int]:
        """Returns the shared runs of the requests, whose rows are in a plan in this order, and their number.

        Two calls return the same number only with the same runs.

        O(rows); O(edges) more if the requests differ from those of the previous call.
        """
        leases = [None if request.blocks.skipped else request.blocks.lease for request in requests]
        if leases != self._leases:
            self._leases = leases
            self._runs_id += 1
            self._runs = tuple(
                SharedRun(run.leases, run.first_page, run.n_pages)
                for run in self._cache.tree.shared_runs(leases)
                if run.n_pages >= self._min_pages
            )
        return self._runs, self._runs_id
