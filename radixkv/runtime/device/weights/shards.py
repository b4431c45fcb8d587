"""The part of a checkpoint's tensors that one rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.safetensors import TensorSource
from radixkv.runtime.device.weights.shapes import TensorShapes, tensor_shapes


class Shard(NamedTuple):
    """Which part of a model a rank has."""

    rank: int
    n_ranks: int


class ShardedTensors:
    """A ``TensorSource`` of the part of each tensor that a rank has.

    A tensor is cut in the dimension in which a rank has fewer than all values. Where there are fewer KV heads than
    ranks, several ranks have the same ones. What is added to a sum over ranks, the biases of attention's output and
    of the MLP's, is rank 0's; the others have zeros.

    Args:
        source: of the whole tensors, in dense formats.
        config: of the whole model.
        shard: the rank's.
    """

    def __init__(self, source: TensorSource, config: DecoderConfig, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        self._shapes: TensorShapes = tensor_shapes(config)
        self._local: TensorShapes = tensor_shapes(config.shard(shard.n_ranks))
        names = config.names
        self._of_rank_0 = {
            f"{name.format(layer=layer)}{bias}"
            for layer in range(config.n_layers)
            for name, bias in ((names.output, ".bias"), (names.down, ".bias"), (names.stacked_down, "_bias"))
        }

    def fill(self, name: str, out: Tensor) -> None:
        """See ``TensorSource.fill``. Needs memory for the whole tensor."""
        shape, local = self._shapes[name], self._local[name]
        if shape == local:
            self._source.fill(name, out)
            if self._shard.rank and name in self._of_rank_0:
                out.zero_()
            return
        whole = torch.empty(shape, dtype=out.dtype, device=out.device)
        self._source.fill(name, whole)
        out.copy_(self._cut(whole, local).reshape(out.shape))

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """See ``TensorSource.compute``."""
        raise AssertionError("only dense tensors are cut, which are filled")

    def _cut(self, whole: Tensor, local: tuple[int, ...]) -> Tensor:
        (dimension,) = (d for d, size in enumerate(local) if size != whole.shape[d])
        size = local[dimension]
        first = self._shard.rank * whole.shape[dimension] // self._shard.n_ranks // size * size
        return whole.narrow(dimension, first, size)
