"""Recovery from steps that went wrong: failed ones, and those with non-finite rows."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.errors import DeviceFailure, NumericalFailure
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.running import RunningRequests


class RetryQueue:
    """The requests to retry alone, first those of the earliest failure, then by priority and age."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, undone: Iterable[Request]) -> None:
        """Adds those requests of undone steps that have not ended."""
        retried = {request for request in undone if request.phase is Phase.PREEMPTED}
        self._requests += sorted(retried, key=lambda request: request.order)

    def ready(self) -> list[Request]:
        """Returns the requests in the order in which to retry them. O(requests).

        Each stays in its place until its retry is over. It is left out while it is paused.
        """
        self._requests = [
            one for one in self._requests if one.recovery.is_retried and one.phase is not Phase.FINISHED
        ]
        return [request for request in self._requests if not request.is_paused]


def undo_steps(cache: PageCache, running: RunningRequests, involved: Iterable[Request]) -> list[Update]:
    """Undoes all launched steps after a failure: detaches the pages that they should have written, preempts
    their requests, and forgets what the device has of their block tables.

    Each involved request is to be retried alone. One whose step fails although it was alone ends with an error. So
    a request that breaks its steps ends without failing any other. O(running).

    Args:
        cache: the page cache of the requests.
        running: all running requests.
        involved: the requests of the steps' rows, newest first.
    """
    suspects = dict.fromkeys(involved)
    for request in suspects:
        request.blocks.n_on_device = 0  # the device may have got any part of what the steps changed
    for reader in _detach(cache, running, suspects):
        if reader not in suspects and reader.phase is not Phase.FINISHED:
            running.preempt(reader)
    updates = []
    for request in suspects:
        if request.phase is Phase.FINISHED:
            continue
        if request.recovery.is_retried:
            running.finish(request)
            error = DeviceFailure("the device failed on this request, and again when it ran alone")
            updates.append(Update(request, error=error))
        else:
            request.recovery.is_retried = True
            running.preempt(request)
    return updates


def recompute_without_tree(cache: PageCache, running: RunningRequests, request: Request) -> list[Update]:
    """Recovers from a non-finite row: detaches the pages on its path that no finite row has computed, and preempts
    every request that reads them.

    The request itself is computed once more, without the tree; if that row is not finite either, it ends with an
    error. O(running).
    """
    for reader in _detach(cache, running, [request]):
        if reader is not request and reader.phase is not Phase.FINISHED:
            running.preempt(reader)
    if request.phase is Phase.FINISHED or request.recovery.discards_results:
        return []
    if request.recovery.bypasses_tree:
        running.finish(request)
        text = "the model gave non-finite values for this request, also when computed without the cache"
        return [Update(request, error=NumericalFailure(text))]
    request.recovery.bypasses_tree = True
    running.preempt(request)
    return []


def _detach(cache: PageCache, running: RunningRequests, requests: Iterable[Request]) -> list[Request]:
    """Detaches the pages on the requests' paths that no finite row has computed; returns the active and releasing
    requests whose paths contain them. O(running)."""
    broken = {node for request in requests if (node := cache.detach_uncomputed(request.blocks)) is not None}
    readers = [(r, r.blocks.lease) for r in (*running, *running.releasing)]
    return [r for r, lease in readers if lease is not None and cache.tree.passes_through(lease, broken)]
