"""The output head of a model that several GPUs compute, each the logits of some tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from radixkv.runtime.device.ops.base import Linear, Rows
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.weights.layer_weights import LinearWeights

_TOKENS = 64
"""Parts have multiples of so many tokens, for which products have the fastest kernels."""


def part_size(vocab_size: int, n_ranks: int) -> int:
    """Returns how many tokens each rank computes logits of."""
    return min(vocab_size, -(-vocab_size // (n_ranks * _TOKENS)) * _TOKENS)


def first_token(vocab_size: int, n_ranks: int, rank: int) -> int:
    """Returns the first token of a rank. At the end of the vocabulary ranks have some of the same tokens."""
    size = part_size(vocab_size, n_ranks)
    return min(rank * size, vocab_size - size)


class DividedHead(Linear):
    """The output head, of which each GPU has the rows of some tokens. Rank 0 gets all logits.

    Args:
        collectives: of the rank; connected before the first call.
        linear: returns a product of the device.
        weights: of the whole head, of which a view is taken: they may not be loaded yet.
    """

    def __init__(
        self,
        collectives: CudaCollectives,
        linear: Callable[[LinearWeights], Linear],
        weights: LinearWeights,
    ) -> None:
        weight = weights.weight
        assert isinstance(weight, Tensor), "heads are dequantized"
        self._collectives = collectives
        self._size = part_size(len(weight), collectives.size)
        first = first_token(len(weight), collectives.size, collectives.rank)
        self._linear = linear(LinearWeights(weight[first : first + self._size]))

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``. All ranks must do this; ``out`` is needed, and written by rank 0."""
        assert isinstance(x, Tensor), "the final norm writes tensors"
        assert out is not None, "the runner has memory for logits"
        self._linear(x, self._collectives.logits_part(len(x), self._size))
        self._collectives.gather_logits(self._size, out)
        return out
