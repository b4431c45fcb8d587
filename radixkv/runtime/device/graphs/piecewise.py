"""Piecewise CUDA graphs: everything between two mixers is captured, but neither attention nor scans of states.

For an 8B model they reduce a small step with prompts from hundreds of launches to some eighty. Mixers are launched
eagerly because what they compute depends on the rows of a step. So a graph fits every step with the same number of
tokens, whether these are of prompts, decode rows or both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.graphs.decode import capture_graph, smallest_bucket
from radixkv.runtime.device.model.decoder import Decoder, OutputTokens
from radixkv.runtime.device.model.mixers import LayerCaches
from radixkv.runtime.device.ops.base import Sequences, TokenInputs

_MAX_TOKENS = 512
"""Largest bucket. Above it, an 8B model's step takes longer on the GPU than to launch, even on an H200."""

logger = logging.getLogger(__name__)


def token_buckets(max_tokens: int) -> list[int]:
    """Returns the numbers of tokens that get graphs, ascending: close where an additional token is costly."""
    largest = min(max_tokens, _MAX_TOKENS)
    return [size for size in (16, 32, 64, *range(128, _MAX_TOKENS, 64)) if size < largest] + [largest]


class PiecewiseGraphs:
    """Captured pieces of a step by bucket (number of tokens).

    All graphs share one memory pool and one set of activations, as one step runs at a time.

    Memory: the activations, some three hidden states per token; temporary tensors of the largest bucket; and driver
    memory of one graph per layer and bucket.

    Args:
        decoder: its layers are captured.
        stream: graphs are captured and replayed here.
    """

    def __init__(self, decoder: Decoder, stream: torch.cuda.Stream) -> None:
        self._decoder = decoder
        self._stream = stream
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._activations = decoder.empty_activations(0)

    def capture(self, sizes: Sequence[int], inputs: Callable[[int], TokenInputs], pool: LayerCaches) -> int:
        """Captures the graphs of each bucket, the largest first. Takes up to a second. Returns their number.

        Args:
            sizes: the buckets.
            inputs: returns valid inputs of a bucket's tokens, at fixed addresses.
            pool: the KV pool, at a fixed address.
        """
        begun = time.monotonic()
        memory = torch.cuda.graph_pool_handle()
        self._activations = self._decoder.empty_activations(max(sizes, default=0))
        for bucket in sorted(sizes, reverse=True):
            activations, bucket_inputs = self._activations.first(bucket), inputs(bucket)
            pieces = [partial(self._decoder.run_before_first_mixer, activations, bucket_inputs, pool)]
            pieces += [
                partial(self._decoder.run_between_mixers, index, activations, bucket_inputs, pool)
                for index in range(self._decoder.n_mixers - 1)
            ]
            # The first call of libraries and compilers does work that cannot be captured.
            for piece in [pieces[0], *(pieces[1 + index] for index in self._decoder.distinct_mixers)]:
                piece()
            self._graphs[bucket] = [capture_graph(piece, self._stream, memory) for piece in pieces]
        n_graphs = sum(map(len, self._graphs.values()))
        logger.info("captured %d piecewise graphs in %.1f s", n_graphs, time.monotonic() - begun)
        return n_graphs

    def clear(self) -> None:
        """Drops all graphs and frees their memory."""
        self._graphs.clear()
        self._activations = self._decoder.empty_activations(0)

    def bucket(self, n_tokens: int) -> int | None:
        """Returns the smallest captured bucket of at least ``n_tokens``; None if there is none."""
        return smallest_bucket(n_tokens, self._graphs)

    def run(
        self,
        bucket: int,
        n_tokens: int,
        pool: LayerCaches,
        sequences: Sequences,
        attention: LayerAttention,
        output_tokens: OutputTokens | None = None,
    ) -> Tensor:
        """Returns what ``Decoder.__call__`` returns.

        The inputs must be at the captured addresses; padding tokens, up to the bucket, must have slot mapping -1.

        Args:
            bucket: a captured bucket.
            n_tokens: tokens of the step, at most ``bucket``.
            pool: the captured KV pool. It is not stored here, so that it can be freed before the next is allocated.
            sequences: the rows of the step, for layers with states.
            attention: of the step.
            output_tokens: the tokens whose states are returned; None for all.
        """
        activations = self._activations.first(n_tokens)
        first, *others = self._graphs[bucket]
        first.replay()
        for index, piece in enumerate(others):
            self._decoder.mix(index, activations, pool, attention, sequences)
            piece.replay()
        return self._decoder.run_from_last_mixer(activations, pool, attention, sequences, output_tokens)
