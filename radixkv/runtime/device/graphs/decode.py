"""CUDA graphs of decode steps: a step of few tokens is hundreds of launches, and one replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

VariantT = TypeVar("VariantT", bound=Hashable)
PlanT = TypeVar("PlanT")

logger = logging.getLogger(__name__)


def buckets(max_rows: int) -> list[int]:
    """Batch sizes that have a graph, ascending: close where a row more costs much, and never 12% of rows idle
    above 112."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def bucket_of(n: int, buckets: Iterable[int]) -> int | None:
    """The smallest that is at least ``n``; None if none is."""
    return min((bucket for bucket in buckets if bucket >= n), default=None)


def captured(body: Callable[[], object], stream: torch.cuda.Stream, memory: Any) -> torch.cuda.CUDAGraph:
    """What ``body`` enqueues, without running it. Waits for the stream.

    Args:
        stream: the current one.
        memory: a handle of ``torch.cuda.graph_pool_handle``; graphs that share one must not run at the same time.
    """
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not the context manager: it empties torch's cache and collects garbage at each graph.
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        body()
    except BaseException:
        with suppress(RuntimeError):  # that the capture was broken, which ``body`` says better
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


class DecodeGraphs:
    """Captured steps by bucket and variant. All share one memory pool: one graph runs at a time.

    Args:
        stream: where graphs are captured and replayed.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, Hashable], torch.cuda.CUDAGraph] = {}
        self._buckets: set[int] = set()

    def capture(
        self,
        sizes: Sequence[int],
        variants: Callable[[int], Sequence[VariantT]],
        prepare: Callable[[int, VariantT], PlanT],
        body: Callable[[PlanT], None],
    ) -> int:
        """Captures each bucket, the largest first, so that the smaller ones fit into its memory; how many graphs
        there are then. Seconds.

        Args:
            variants: those of a bucket; one that has none gets no graph.
            prepare: makes what the body reads on the device a valid step of that bucket and variant, and plans it.
            body: enqueues a planned step; the same kernels on the same addresses each time.
        """
        begun = time.monotonic()
        for bucket in sorted(sizes, reverse=True):
            for variant in variants(bucket):
                plan = prepare(bucket, variant)
                body(plan)  # libraries and compilers do at their first call what no graph may hold
                self._graphs[bucket, variant] = captured(partial(body, plan), self._stream, self._memory)
        self._buckets = {bucket for bucket, _ in self._graphs}
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - begun)
        return len(self._graphs)

    def clear(self) -> None:
        """Forgets what was captured."""
        self._graphs.clear()
        self._buckets.clear()
        self._memory = torch.cuda.graph_pool_handle()  # the one before went with its last graph

    def bucket(self, n_rows: int) -> int | None:
        """The smallest bucket that holds so many rows; None if none does."""
        return bucket_of(n_rows, self._buckets)

    def replay(self, bucket: int, variant: Hashable) -> None:
        """Enqueues the captured step on the current stream."""
        self._graphs[bucket, variant].replay()
