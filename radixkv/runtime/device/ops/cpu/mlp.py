"""MLPs on the CPU, dense or mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.families import Activation
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Rows, as_tensor
from radixkv.runtime.device.ops.cpu.layers import Linear, RowTiles, activate
from radixkv.runtime.device.weights.weights import ExpertsWeights, MlpWeights


class Mlp(base.Mlp):
    """Dense MLP: ``down(silu(gate(x)) * up(x))``, or with another activation."""

    _CHUNK_ROWS = 256
    """Rows computed at once, few enough to keep the intermediate activations in the processor's cache."""

    def __init__(self, weights: MlpWeights, tiles: RowTiles, activation: Activation) -> None:
        self._activation: Activation = activation
        self._gate_up = Linear(weights.gate_up, tiles)
        self._down = Linear(weights.down, tiles)

    def __call__(self, x: Rows) -> Tensor:
        """See ``ops.base.Mlp``."""
        assert isinstance(x, Tensor), "norms write tensors on the CPU"
        chunks = []
        for rows in x.split(self._CHUNK_ROWS):
            chunks.append(self._down(activate(self._activation, self._gate_up(rows))))
        return torch.cat(chunks)


class Experts(base.Mlp):
    """Mixture of experts: a weighted sum of the MLPs that a router selects for each token.

    Only selected experts compute, each for all of its tokens at once. A token's terms are always added in the order
    of expert indices, so the result does not depend on other tokens.
    """

    def __init__(
        self,
        weights: ExpertsWeights,
        tiles: RowTiles,
        activation: Activation,
        *,
        n_active: int,
        normalizes: bool,
    ) -> None:
        self._n_active = n_active
        self._normalizes = normalizes
        self._router = Linear(weights.router, tiles)
        self._experts = [Mlp(expert, tiles, activation) for expert in weights.experts()]

    def __call__(self, x: Rows) -> Tensor:
        """See ``ops.base.Mlp``."""
        x = as_tensor(x)
        expert_weights, chosen = self._route(x)
        total = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, ranks = (chosen == index).nonzero(as_tuple=True)
            # Each row occurs at most once, so the order of additions is fixed.
            total.index_add_(0, rows, self._experts[index](x[rows]) * expert_weights[rows, ranks, None])
        return total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and indices of the selected experts, each [rows, active]."""
        expert_weights, chosen = self._router(x).float().softmax(-1).topk(self._n_active, -1)
        if self._normalizes:
            expert_weights = expert_weights / expert_weights.sum(-1, keepdim=True)
        return expert_weights.to(x.dtype), chosen
