"""A page cache that measures the time spent in it, for the metric ``cache_seconds``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Concatenate, ParamSpec, TypeVar

from radixkv.runtime.cache.cache import PageCache

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    method: Callable[Concatenate[PageCache, _P], _R],
) -> Callable[Concatenate[TimedPageCache, _P], _R]:
    """Returns the method with its wall time added to ``TimedPageCache.seconds``."""

    @functools.wraps(method)
    def timed(self: TimedPageCache, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        start = perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - start

    return timed


class TimedPageCache(PageCache):
    """A ``PageCache`` that measures the time in its methods for requests.

    No timed method calls another one, so no time counts twice. ``explain`` is not timed: it manages no memory.
    """

    seconds = 0.0
    """Wall time spent in these methods since the creation of the cache, in seconds."""

    matches = _timed(PageCache.matches)
    open = _timed(PageCache.open)
    count_hit = _timed(PageCache.count_hit)
    extend = _timed(PageCache.extend)
    copy_partial_page = _timed(PageCache.copy_partial_page)
    release_sources = _timed(PageCache.release_sources)
    reserve = _timed(PageCache.reserve)
    append_pages = _timed(PageCache.append_pages)
    fork = _timed(PageCache.fork)
    free_behind = _timed(PageCache.free_behind)
    commit = _timed(PageCache.commit)
    mark_computed = _timed(PageCache.mark_computed)
    commit_computed = _timed(PageCache.commit_computed)
    free_replaced = _timed(PageCache.free_replaced)
    detach_uncomputed = _timed(PageCache.detach_uncomputed)
    passes_through = _timed(PageCache.passes_through)
    shared_runs = _timed(PageCache.shared_runs)
    close = _timed(PageCache.close)
    flush = _timed(PageCache.flush)
