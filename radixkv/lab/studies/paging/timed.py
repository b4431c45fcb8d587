"""A page cache and attention on the CPU that measure the time spent in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.attention.cpu.base import Attention, RowSpan

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    method: Callable[Concatenate[PageCache, _P], _R],
) -> Callable[Concatenate[TimedPageCache, _P], _R]:
    """Returns the method with its wall time added to ``TimedPageCache.seconds``."""

    @functools.wraps(method)
    def timed(self: TimedPageCache, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._is_timing:
            return method(self, *args, **kwargs)
        start, self._is_timing = perf_counter(), True
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - start
            self._is_timing = False

    return timed


class TimedPageCache(PageCache):
    """A ``PageCache`` that measures the time in its methods for requests. No time counts twice."""

    seconds = 0.0
    """Wall time spent in these methods since the creation of the cache, in seconds."""
    _is_timing = False

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
    close = _timed(PageCache.close)
    flush = _timed(PageCache.flush)


class TimedAttention:
    """Attention of the CPU's executor that measures how long it takes, the writes of K and V included."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.seconds = 0.0
        """Wall time spent in ``run`` since the creation, all layers together, in seconds."""

    def plan(self, spans: Sequence[RowSpan], window_spans: Sequence[RowSpan] | None = None) -> None:
        """See ``Attention.plan``."""
        self._attention.plan(spans, window_spans)

    def run(self, *args: Any) -> None:
        """See ``LayerAttention.run``."""
        start = perf_counter()
        self._attention.run(*args)
        self.seconds += perf_counter() - start
