"""The output head of a model that several GPUs compute, each the logits of some tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from radixkv.runtime.device.ops.base import Linear, Rows
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.weights.layer_weights import LinearWeights

_TOKENS = 64
"""Parts have multiples of so many tokens, for which products have the fastest kernels."""


def part_size(vocab_size: int, n_ranks: int) -> int:
    """Returns how many tokens each rank computes logits of, more than the vocabulary has at its end."""
    return -(-vocab_size // (n_ranks * _TOKENS)) * _TOKENS


class DividedHead(Linear):
    """The output head, of which each GPU has the rows of some tokens. Rank 0 gets all logits.

    Args:
        collectives: of the rank; connected before the first call.
        linear: returns a product of the device.
        weight: [vocab, hidden]; of the whole head.
        is_embedding: whether the weight is the embedding's, too. Otherwise only this rank's part is kept.
    """

    def __init__(
        self,
        collectives: CudaCollectives,
        linear: Callable[[LinearWeights], Linear],
        weight: Tensor,
        *,
        is_embedding: bool,
    ) -> None:
        self._collectives = collectives
        self._size = part_size(len(weight), collectives.size)
        part = weight[collectives.rank * self._size :][: self._size]
        if len(part) < self._size:
            part = functional.pad(part, (0, 0, 0, self._size - len(part)))
        elif not is_embedding:
            part = part.clone()
        self._linear = linear(LinearWeights(part))

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``. All ranks must do this; ``out`` is needed, and written by rank 0."""
        assert isinstance(x, Tensor), "the final norm writes tensors"
        assert out is not None, "the runner has memory for logits"
        self._linear(x, self._collectives.logits_part(len(x), self._size))
        self._collectives.gather_logits(self._size, out)
        return out
