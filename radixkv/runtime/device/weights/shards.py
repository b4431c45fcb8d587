"""The part of a checkpoint's tensors that one rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.safetensors import TensorViews
from radixkv.runtime.device.weights.shapes import TensorShapes, tensor_shapes


class Shard(NamedTuple):
    """Which part of a model a rank has."""

    rank: int
    n_ranks: int


class ShardedTensors:
    """The ``TensorViews`` and the ``TensorSource`` of the part of each tensor that a rank has.

    A tensor is cut in the dimension in which a rank has fewer than all values. Where there are fewer KV heads than
    ranks, several ranks have the same ones. What is added to a sum over ranks, the biases of attention's output and
    of the MLP's, is rank 0's; the others have zeros.

    Args:
        views: of the whole tensors, in dense formats.
        config: of the whole model.
        shard: the rank's.
    """

    def __init__(self, views: TensorViews, config: DecoderConfig, shard: Shard) -> None:
        self._views = views
        self._shard = shard
        self._shapes: TensorShapes = tensor_shapes(config)
        self._local: TensorShapes = tensor_shapes(config.shard(shard.n_ranks))
        names = config.names
        self._of_rank_0 = {
            f"{name.format(layer=layer)}{bias}"
            for layer in range(config.n_layers)
            for name, bias in ((names.output, ".bias"), (names.down, ".bias"), (names.stacked_down, "_bias"))
        }

    def view(self, name: str) -> Tensor:
        """See ``TensorViews.view``. A part may have gaps between its rows."""
        whole = self._views.view(name)
        if name not in self._shapes or (shape := self._shapes[name]) == (local := self._local[name]):
            return torch.zeros_like(whole) if self._shard.rank and name in self._of_rank_0 else whole
        (dimension,) = (d for d, size in enumerate(local) if size != shape[d])
        size = local[dimension]
        first = self._shard.rank * shape[dimension] // self._shard.n_ranks // size * size
        return whole.narrow(dimension, first, size)

    def fill(self, name: str, out: Tensor) -> None:
        """See ``TensorSource.fill``."""
        out.copy_(self.view(name).view(out.shape))

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """See ``TensorSource.compute``."""
        raise AssertionError("only dense tensors are cut, which are filled")
