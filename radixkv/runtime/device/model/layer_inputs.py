"""The inputs that each layer has beside the residual stream (Gemma 4's per-layer embeddings)."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.ops.base import Operations, as_tensor
from radixkv.runtime.device.weights.layer_weights import LayerInputsWeights


class LayerInputs:
    """A token's embedding of each layer, beside a projection of the embedding that the first layer reads.

    Args:
        weights: of both.
        operations: of the device that has the weights.
        n_layers: number of layers.
    """

    def __init__(self, weights: LayerInputsWeights, operations: Operations, *, n_layers: int) -> None:
        n_values, hidden_size = weights.embedding.shape[1], weights.hidden_size
        self._shape = (-1, n_layers, n_values // n_layers)
        self._embedding = weights.embedding
        self._embedding_scale = rounded(self._shape[2] ** 0.5, weights.embedding.dtype)
        self._projection = operations.linear(weights.projection)
        self._projection_scale = hidden_size**-0.5
        self._norm = operations.norm(weights.norm)

    def __call__(self, ids: Tensor, embedded: Tensor, out: Tensor) -> None:
        """Writes the inputs of all layers.

        Args:
            ids: [tokens].
            embedded: [tokens, hidden], scaled embeddings of the tokens.
            out: [tokens, layers, size].
        """
        projected = self._projection(embedded).mul_(self._projection_scale)
        torch.index_select(self._embedding, 0, ids, out=out.flatten(1))
        out.mul_(self._embedding_scale)
        normed = as_tensor(self._norm(projected.view(-1, self._shape[2]))).view(self._shape)
        torch.add(normed, out, out=out).mul_(2.0**-0.5)


def rounded(scale: float, dtype: torch.dtype) -> float:
    """Returns a multiplier of embeddings as Transformers rounds it."""
    return torch.tensor(scale).to(dtype).item()
