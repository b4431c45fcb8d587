"""CUDA graphs of whole decode steps: one replay replaces hundreds of kernel launches."""

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


def decode_buckets(max_rows: int) -> list[int]:
    """Returns the numbers of rows that get a decode graph, ascending.

    They are close where an additional row is costly; above 112 rows, padding is below 12% of the launched rows.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def smallest_bucket(n: int, buckets: Iterable[int]) -> int | None:
    """Returns the smallest bucket of at least ``n``; None if there is none."""
    return min((bucket for bucket in buckets if bucket >= n), default=None)


def capture_graph(body: Callable[[], object], stream: torch.cuda.Stream, memory: Any) -> torch.cuda.CUDAGraph:
    """Captures what ``body`` enqueues, without running it. Waits for the stream.

    Args:
        body: enqueues kernels on the current stream.
        stream: the current stream.
        memory: a handle of ``torch.cuda.graph_pool_handle``; graphs that share one must not run at the same time.
    """
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph would empty torch's cache and collect garbage at each graph.
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        body()
    except BaseException:
        with suppress(RuntimeError):  # says only that the capture failed; the error of ``body`` says why
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


class DecodeGraphs:
    """Captured decode steps by bucket (number of rows) and variant.

    All graphs share one memory pool, as one runs at a time.

    Args:
        stream: graphs are captured and replayed here.
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
        warm_up: Callable[[PlanT], None],
        body: Callable[[PlanT], None],
    ) -> int:
        """Captures a graph for each bucket and variant; takes seconds. Returns the number of graphs.

        The largest bucket comes first, so that smaller ones fit into its memory.

        Args:
            sizes: the buckets.
            variants: returns a bucket's variants; a bucket without any gets no graph.
            prepare: stages a valid step of a bucket and variant on the device, and returns its plan.
            warm_up: enqueues each kernel of a planned step at least once. The first call of libraries and compilers
                does work that cannot be captured.
            body: enqueues a planned step: the same kernels on the same addresses each time.
        """
        begun = time.monotonic()
        for bucket in sorted(sizes, reverse=True):
            for variant in variants(bucket):
                plan = prepare(bucket, variant)
                warm_up(plan)
                self._graphs[bucket, variant] = capture_graph(partial(body, plan), self._stream, self._memory)
        self._buckets = {bucket for bucket, _ in self._graphs}
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - begun)
        return len(self._graphs)

    def clear(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()
        self._buckets.clear()
        self._memory = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph

    def bucket(self, n_rows: int) -> int | None:
        """Returns the smallest captured bucket of at least ``n_rows``; None if there is none."""
        return smallest_bucket(n_rows, self._buckets)

    def replay(self, bucket: int, variant: Hashable) -> None:
        """Enqueues the captured step on the current stream."""
        self._graphs[bucket, variant].replay()
