"""What a layer does to each token by itself: one MLP, or those of the experts that the token chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.ops.cpu.layers import Linear, RowTiles, swiglu
from radixkv.runtime.device.spec.config import ExpertConfig
from radixkv.runtime.device.weights.weights import ExpertsWeights, MlpWeights


class Mlp:
    """``down(silu(gate(x)) * up(x))``."""

    rows_at_a_time = 256
    """As many as keep the wide activations in the processor's cache."""

    def __init__(self, weights: MlpWeights, tiles: RowTiles) -> None:
        self._gate_up = Linear(weights.gate_up, tiles)
        self._down = Linear(weights.down, tiles)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> the same."""
        return self._down(swiglu(self._gate_up(x)))


class Experts:
    """A weighted sum of the MLPs that a router picks for each token.

    Only experts that some token picked compute, each all of its tokens together. A token's terms are added in the
    order of the experts' indices, whoever else is there.
    """

    rows_at_a_time = 2048
    """Many, since they are divided among the experts."""

    def __init__(self, config: ExpertConfig, weights: ExpertsWeights, tiles: RowTiles) -> None:
        self._n_active = config.n_active
        self._normalizes = config.normalizes
        self._router = Linear(weights.router, tiles)
        self._experts = [Mlp(expert, tiles) for expert in weights.experts]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> the same."""
        shares, chosen = self._route(x)
        total = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            # Each row is there once, so that no order of additions is left open.
            total.index_add_(0, rows, self._experts[index](x[rows]) * shares[rows, places, None])
        return total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' weights and indices, [rows, active] each."""
        shares, chosen = self._router(x).float().softmax(-1).topk(self._n_active, -1)
        if self._normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(x.dtype), chosen
