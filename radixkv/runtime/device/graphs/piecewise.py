"""CUDA graphs of what lies between two attentions: for an 8B model, a small step with prompts is hundreds of
launches, and some eighty with them.

Attention itself is enqueued as ever: its plan differs from step to step. So a graph fits every step of so many
tokens, be they prompts, rows that continue answers, or both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import LayerAttention
from radixkv.runtime.device.graphs.decode import bucket_of, captured
from radixkv.runtime.device.kv_pool_cuda import CudaPool
from radixkv.runtime.device.model.decoder_cuda import CudaDecoder, Wanted
from radixkv.runtime.device.persistent_batch_cuda import Places

_MAX_TOKENS = 512
"""Above, an 8B model's step takes the GPU longer than the host needs to launch it, even on an H200."""

logger = logging.getLogger(__name__)


def token_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens that have graphs, ascending: close where a token more costs time."""
    largest = min(max_tokens, _MAX_TOKENS)
    return [size for size in (16, 32, 64, *range(128, _MAX_TOKENS, 64)) if size < largest] + [largest]


class PieceGraphs:
    """Captured pieces of a step by bucket. All share one memory pool, and one batch: one step runs at a time.

    Memory: the batch, some four hidden states a token; what the largest bucket takes between attentions;
    and what the driver keeps of as many graphs as the model has layers, for each bucket.

    Args:
        decoder: what is captured.
        stream: where graphs are captured and replayed.
    """

    def __init__(self, decoder: CudaDecoder, stream: torch.cuda.Stream) -> None:
        self._decoder = decoder
        self._stream = stream
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._batch = decoder.empty_batch(0)

    def capture(self, sizes: Sequence[int], places: Callable[[int], Places], pool: CudaPool) -> int:
        """Captures each bucket, the largest first; how many graphs there are then. Up to a second.

        Args:
            places: of a bucket's tokens, in memory that stays where it is; valid already.
            pool: stays where it is.
        """
        begun = time.monotonic()
        memory = torch.cuda.graph_pool_handle()
        self._batch = self._decoder.empty_batch(max(sizes, default=0))
        for bucket in sorted(sizes, reverse=True):
            batch, where = self._batch.first(bucket), places(bucket)
            pieces = [partial(self._decoder.enter, batch, where, pool)]
            pieces += [
                partial(self._decoder.advance, index, batch, where, pool)
                for index in range(self._decoder.n_layers - 1)
            ]
            for piece in pieces[:2]:  # what libraries and compilers do at their first call; layers are alike
                piece()
            self._graphs[bucket] = [captured(piece, self._stream, memory) for piece in pieces]
        n_graphs = sum(map(len, self._graphs.values()))
        logger.info("captured %d pieces of prompt steps in %.1f s", n_graphs, time.monotonic() - begun)
        return n_graphs

    def clear(self) -> None:
        """Forgets what was captured, and gives its memory back."""
        self._graphs.clear()
        self._batch = self._decoder.empty_batch(0)

    def bucket(self, n_tokens: int) -> int | None:
        """The smallest bucket that holds so many tokens; None if none does."""
        return bucket_of(n_tokens, self._graphs)

    def run(
        self, bucket: int, n_tokens: int, pool: CudaPool, attention: LayerAttention, wanted: Wanted | None = None
    ) -> Tensor:
        """What the decoder's call gives, for tokens whose places are where they were captured; those behind them,
        up to the bucket, must be written nowhere. In memory that the next call writes again.

        Args:
            pool: that of the capture. It is not kept here, so that its memory can go before the next one is made.
        """
        batch = self._batch.first(n_tokens)
        first, *others = self._graphs[bucket]
        first.replay()
        for index, piece in enumerate(others):
            attention.run(index, batch.q, *pool.layer(index), batch.attended)
            piece.replay()
        return self._decoder.leave(batch, pool, attention, wanted)
