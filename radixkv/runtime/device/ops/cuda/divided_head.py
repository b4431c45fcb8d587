"""The output head of a model that several GPUs compute, each the logits of some tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from radixkv.runtime.device.ops.base import Linear, Rows
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.weights.layer_weights import LinearWeights
from radixkv.runtime.device.weights.shards import Shard


class DividedHead(Linear):
    """The output head, of which each GPU has the rows of some tokens. Rank 0 gets all logits.

    Args:
        collectives: of the rank; connected before the first call.
        linear: returns a product of the device.
        vocab_size: tokens of the whole head.
        weights: of the rank's tokens, or of all, of which a view is taken: they may not be loaded yet.
    """

    def __init__(
        self,
        collectives: CudaCollectives,
        linear: Callable[[LinearWeights], Linear],
        vocab_size: int,
        weights: LinearWeights,
    ) -> None:
        weight = weights.weight
        assert isinstance(weight, Tensor), "heads are dequantized"
        self._collectives = collectives
        cut = Shard(collectives.rank, collectives.size).head(vocab_size)
        self._size = cut.size
        self._linear = linear(LinearWeights(weight if len(weight) == cut.size else cut.of(weight)))

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``. All ranks must do this; ``out`` is needed, and written by rank 0."""
        assert isinstance(x, Tensor), "the final norm writes tensors"
        assert out is not None, "the runner has memory for logits"
        self._linear(x, self._collectives.logits_part(len(x), self._size))
        self._collectives.gather_logits(self._size, out)
        return out
