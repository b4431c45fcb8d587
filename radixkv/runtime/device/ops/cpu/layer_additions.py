"""What layers of some models add beside attention and MLP: experts, and an input of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.families import Activation
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.cpu.layers import LayerNorm, Linear, RMSNorm, activate

Norm = RMSNorm | LayerNorm


class ExpertsBeside(base.ExpertsBeside):
    """Experts that compute the residual stream beside the MLP, which has a norm of its own before and after.

    The router reads the residual stream divided by its root mean square, times a weight, over the root of the size.

    Args:
        experts: and their router.
        router_scale: [hidden], weight of the router's input.
        eps: of the router's norm.
        norm: of the experts' input.
        after_mlp: norm of the MLP's output.
        after_experts: norm of the experts' output.
    """

    def __init__(
        self,
        experts: base.RoutedExperts,
        router_scale: Tensor,
        eps: float,
        norm: Norm,
        after_mlp: Norm,
        after_experts: Norm,
    ) -> None:
        self._experts = experts
        self._router_scale = router_scale
        self._router_norm = RMSNorm(torch.ones(len(router_scale)), eps)
        self._norm = norm
        self._after_mlp = after_mlp
        self._after_experts = after_experts

    def __call__(self, computed: Tensor, residual: Tensor) -> Tensor:
        """See ``ops.base.ExpertsBeside``."""
        routed = self._router_norm(residual).mul_(self._router_scale).mul_(len(self._router_scale) ** -0.5)
        mixed = self._experts.mixed(self._norm(residual), routed)
        return self._after_mlp(computed).add_(self._after_experts(mixed))


class LayerInput(base.LayerInput):
    """``norm(output(activation(gate(residual)) * layer_input))``."""

    def __init__(self, gate: Linear, output: Linear, norm: Norm, activation: Activation) -> None:
        self._gate = gate
        self._output = output
        self._norm = norm
        self._activation: Activation = activation

    def __call__(self, residual: Tensor, layer_input: Tensor) -> Tensor:
        """See ``ops.base.LayerInput``."""
        gated = activate(self._activation, torch.cat([self._gate(residual), layer_input], -1))
        return self._norm(self._output(gated))
