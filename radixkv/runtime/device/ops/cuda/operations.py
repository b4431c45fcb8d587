"""The decoder's operations on CUDA, over fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig, ExpertConfig
from radixkv.runtime.device.ops.base import Norm, TokenInputs
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.linear import gated_linear, linear
from radixkv.runtime.device.ops.cuda.linear_add_norm import add_linear_and_norm
from radixkv.runtime.device.ops.cuda.norm import add_rms_norm, rms_norm
from radixkv.runtime.device.ops.cuda.rotary import rotate_and_store
from radixkv.runtime.device.weights.weights import ExpertsWeights, LinearWeights, MlpWeights


class CudaOperations:
    """``Operations`` on one GPU.

    Args:
        config: of the model.
        max_positions: most positions of a sequence.
        device: where the weights are.
    """

    def __init__(self, config: DecoderConfig, max_positions: int, device: torch.device) -> None:
        self._config = config
        angles = torch.arange(max_positions).float()[:, None] * config.rope.frequencies(config.head_dim)
        halves = [angles.cos() * config.rope.amplitude, angles.sin() * config.rope.amplitude]
        self._cosine_sine = torch.cat(halves, -1).to(device)
        """[max_positions, head_dim] float32: cosines, then sines, each of half the head's dimensions."""

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return Linear(weights.weight, weights.bias)

    def norm(self, weight: Tensor) -> RMSNorm:
        """See ``Operations.norm``."""
        return RMSNorm(weight, self._config.norm_eps)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return Mlp(self.linear(weights.gate_up), self.linear(weights.down))

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> NoReturn:
        """Raises ``ConfigError``."""
        raise ConfigError(
            f"this {self._config.architecture} has experts, which this release does not run on CUDA; "
            "use --device cpu"
        )

    def rotate_and_store(self, query_norm: Tensor | None, key_norm: Tensor | None) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        return RotateAndStore(self._cosine_sine, query_norm, key_norm, self._config.norm_eps)


@dataclass(frozen=True)
class RMSNorm:
    """An RMS norm."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See ``Norm.__call__``."""
        rms_norm(x, self.weight, self.eps, out)


@dataclass(frozen=True)
class Linear:
    """A matrix product. Without a bias it is fused with what follows."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``Linear.__call__``."""
        if out is None:
            out = x.new_empty(len(x), len(self.weight))
        if self.bias is None:
            linear(x, self.weight, out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        return out

    def add_and_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor) -> None:
        """See ``Linear.add_and_norm``."""
        if self.bias is None:
            add_linear_and_norm(x, self.weight, residual, norm.weight, norm.eps, out)
        else:
            add_rms_norm(self(x), residual, norm.weight, norm.eps, out)


@dataclass(frozen=True)
class Mlp:
    """A dense MLP: ``down(silu(gate(x)) * up(x))``."""

    gate_up: Linear
    down: Linear

    def add_and_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor) -> None:
        """See ``Mlp.add_and_norm``."""
        gated = x.new_empty(len(x), len(self.gate_up.weight) // 2)
        if self.gate_up.bias is None:
            gated_linear(x, self.gate_up.weight, gated)
        else:
            silu_and_multiply(self.gate_up(x), gated)
        self.down.add_and_norm(gated, residual, norm, out)


@dataclass(frozen=True)
class RotateAndStore:
    """Norms and rotates heads, and writes K and V into the pool, in one kernel."""

    cosine_sine: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float

    def __call__(self, qkv: Tensor, inputs: TokenInputs, k_cache: Tensor, v_cache: Tensor, q_out: Tensor) -> None:
        """See ``ops.base.RotateAndStore``. The caches are [pages, page_size, kv_heads, head_dim]."""
        rotate_and_store(
            qkv,
            inputs.positions,
            inputs.slot_mapping,
            self.cosine_sine,
            k_cache,
            v_cache,
            q_out,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            eps=self.eps,
        )
