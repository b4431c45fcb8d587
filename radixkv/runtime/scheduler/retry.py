"""What failed steps and non-finite rows mean for the requests that were in them, and for the tree."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.errors import DeviceFailure, NumericalFailure
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.running import RunningRequests


def undo_steps(cache: PageCache, running: RunningRequests, involved: Iterable[Request]) -> list[Update]:
    """All launched steps failed: what they were to write is made unreachable, and their requests go back to the
    queue. They are retried in steps of half as many rows and of nobody else; one that was alone in a step that
    failed ends in error, so that a request that breaks its steps takes no other along. O(running).

    Args:
        involved: the requests of the steps' rows, newest first.
    """
    suspects = dict.fromkeys(involved)
    for reader in _detach(cache, running, suspects):
        if reader not in suspects and reader.phase is not Phase.ENDED:
            running.requeue(reader)
    updates = []
    live = [request for request in suspects if request.phase is not Phase.ENDED]
    for request in sorted(live, key=lambda r: r.serial):
        if request.max_retry_rows == 1 and len(suspects) == 1:  # not beside one that has ended meanwhile
            running.end(request)
            error = DeviceFailure("the device failed on this request, and again when it ran alone")
            updates.append(Update(request, error=error))
        else:
            request.max_retry_rows = max(1, len(live) // 2)
            running.requeue(request)
    return updates


def retry_without_tree(cache: PageCache, running: RunningRequests, request: Request) -> list[Update]:
    """A row was not finite: what no finite row has covered leaves the tree, and its readers start again; the
    request itself is tried once more without the tree."""
    for reader in _detach(cache, running, [request]):
        if reader is not request and reader.phase is not Phase.ENDED:
            running.requeue(reader)
    if request.phase is Phase.ENDED or request.discards_results:
        return []
    if request.bypasses_tree:
        running.end(request)
        text = "the model gave non-finite numbers for this request, also when computed without the cache"
        return [Update(request, error=NumericalFailure(text))]
    request.bypasses_tree = True
    running.requeue(request)
    return []


def _detach(cache: PageCache, running: RunningRequests, requests: Iterable[Request]) -> list[Request]:
    """Detaches what is unsettled on the requests' paths; returns whose path leads through it. O(running)."""
    broken = {node for request in requests if (node := cache.detach_uncomputed(request.blocks)) is not None}
    return [r for r in (*running, *running.releasing) if cache.leads_through(r.blocks, broken)]
