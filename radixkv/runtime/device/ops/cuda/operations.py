"""The decoder's operations on CUDA, over fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from radixkv.errors import ConfigError
from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.model_config.heads import LayerHeads
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Norm, Rows, RowScales, as_tensor
from radixkv.runtime.device.ops.cuda.delta_net.layer import GatedDeltaNet
from radixkv.runtime.device.ops.cuda.expert_routing import SigmoidScores, route
from radixkv.runtime.device.ops.cuda.expert_sums import sum_experts
from radixkv.runtime.device.ops.cuda.fp8_rows import quantize_rows, row_scales, rows_of
from radixkv.runtime.device.ops.cuda.grouped_linear import ExpertActivation, grouped_linear, grouped_tiles
from radixkv.runtime.device.ops.cuda.layers import (
    CudaLinear,
    Fp8Linear,
    Int4Linear,
    LayerNorm,
    Linear,
    Mlp,
    RMSNorm,
)
from radixkv.runtime.device.ops.cuda.logit_cap import cap_logits
from radixkv.runtime.device.ops.cuda.mamba2.layer import Mamba2
from radixkv.runtime.device.ops.cuda.output_gate import multiply_by_sigmoid
from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerInputWeights,
    LinearWeights,
    Matrix,
    MlpWeights,
    NormWeights,
    RecurrentWeights,
)

CHUNK_TOKENS = 8192
"""Tokens that experts compute at once, so that what is between their products takes bounded memory."""


class CudaOperations:
    """``Operations`` on one GPU.

    Args:
        config: of the model.
        max_positions: most positions of a sequence.
        device: where the weights are.
        has_fp8: whether the GPU multiplies in FP8; otherwise only FP8 weights are stored so.
    """

    def __init__(
        self, config: DecoderConfig, max_positions: int, device: torch.device, *, has_fp8: bool = True
    ) -> None:
        self._config = config
        self._has_fp8 = has_fp8
        self._cosine_sine = {
            (rope, size): torch.cat(rope.cosine_sine(size, max_positions), -1).to(device)
            for rope, size in {
                (config.rope_of(layer), config.heads[layer].rotary_dim) for layer in config.attention_layers
            }
            if rope is not None
        }
        """By rotary embedding and number of rotated dimensions, [max_positions, rotary_dim] float32: cosines, then
        sines, each of half the rotated dimensions."""

    def linear(self, weights: LinearWeights) -> CudaLinear:
        """See ``Operations.linear``."""
        if isinstance(weights.weight, Int4Matrix):
            return Int4Linear(weights.weight, weights.bias)
        if isinstance(weights.weight, Fp8Matrix):
            return Fp8Linear(weights.weight, weights.bias, rounds_input=self._has_fp8)
        return Linear(weights.weight, weights.bias)

    def output(self, weights: LinearWeights) -> CudaLinear:
        """See ``Operations.output``."""
        return self.linear(weights)

    def head(self, weights: LinearWeights) -> CudaLinear:
        """See ``Operations.head``."""
        return self.linear(weights)

    def norm(self, weights: NormWeights, reader: base.RowReader | None = None) -> RMSNorm | LayerNorm:
        """See ``Operations.norm``."""
        if weights.bias is not None:
            return LayerNorm(weights.weight, weights.bias, self._config.norm_eps)
        fields = weights.weight, self._config.norm_eps, self._adds_one
        return RMSNorm(*fields) if reader is None else RMSNorm(*fields, reader.input_scales, reader.reads_unrounded)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return Mlp(self.linear(weights.gate_up), self.linear(weights.down), self._config.activation)

    def recurrent_layer(self, weights: RecurrentWeights, config: RecurrentConfig) -> base.RecurrentLayer:
        """See ``Operations.recurrent_layer``."""
        inputs, eps = self.linear(weights.inputs), self._config.norm_eps
        if config.mamba2 is not None:
            return Mamba2(weights, inputs, config, config.mamba2, eps)
        gates = None if weights.gates is None else self.linear(weights.gates)
        return GatedDeltaNet(weights, inputs, config, eps, gates)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """See ``Operations.gated``."""
        multiply_by_sigmoid(x, gate, x)
        return x

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """See ``Operations.capped``."""
        cap_logits(logits, cap)
        return logits

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Experts:
        """See ``Operations.experts``."""
        activation = self._config.activation
        if activation not in ("silu", "clamped_silu", "gelu_tanh", "relu2"):
            raise ConfigError(
                f"this {self._config.architecture} has experts with the activation {activation}, which has no "
                "kernel on CUDA; use --device cpu"
            )
        shared = None
        if weights.shared is not None:
            weight = weights.shared.weight
            shared = SharedExpert(self.mlp(weights.shared.mlp), None if weight is None else self.linear(weight))
        sigmoid = None
        if config.sigmoid is not None:
            assert config.sigmoid.n_groups == 1, "refused by model_support.check_model"
            assert weights.correction is not None, "a router by sigmoid has a correction"
            sigmoid = SigmoidScores(weights.correction, config.sigmoid.scale)
        assert self._has_fp8 or not isinstance(weights.down.weight, Fp8Matrix), "check_fp8_experts refuses this"
        return Experts(
            self.linear(weights.router),
            weights.gate_up,
            weights.down,
            activation,
            n_active=config.n_active,
            normalizes=config.normalizes,
            shared=shared,
            sigmoid=sigmoid,
            scales=weights.scales,
        )

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> base.RoutedExperts:
        """See ``Operations.routed_experts``."""
        return self.experts(weights, config)

    def experts_beside(self, weights: ExpertsBesideWeights, experts: base.RoutedExperts) -> ExpertsBeside:
        """See ``Operations.experts_beside``."""
        return ExpertsBeside(
            experts=experts,
            router_norm=RMSNorm(weights.router_scale, self._config.norm_eps),
            norm=self.norm(weights.norm),
            after_mlp=self.norm(weights.after_mlp),
            after_experts=self.norm(weights.after_experts),
        )

    def layer_input(self, weights: LayerInputWeights) -> LayerInput:
        """See ``Operations.layer_input``."""
        assert self._config.activation == "gelu_tanh", "all models that have such inputs have it"
        return LayerInput(self.linear(weights.gate), self.linear(weights.output), self.norm(weights.norm))

    def rotate_and_store(
        self,
        heads: LayerHeads,
        rope: Rope | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        scales: LayerScales,
    ) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        return RotateAndStore(
            None if rope is None else self._cosine_sine[rope, heads.rotary_dim],
            query_norm,
            key_norm,
            self._config.norm_eps,
            self._adds_one,
            scales,
            has_values=heads.has_values,
            has_value_norm=self._config.has_value_norm,
        )

    @property
    def _adds_one(self) -> bool:
        return self._config.norm == "rms_plus_one"


@dataclass(frozen=True)
class SharedExpert:
    """An expert that computes every token, and what its output is multiplied by."""

    mlp: base.Mlp
    weight: base.Linear | None
    """None: by nothing."""

    def add(self, x: Rows, sums: Tensor) -> None:
        """Adds the output for ``x`` to ``sums``; both are [tokens, hidden].

        Rows in FP8 have the scales of the experts, whose format the shared one's matrices have, or 16 bits.
        """
        computed = self.mlp(as_tensor(x) if self.mlp.input_scales is None else x)
        if self.weight is None:
            sums.add_(computed)
            return
        multiply_by_sigmoid(computed, self.weight(as_tensor(x)), sums, adds=True)


@dataclass(frozen=True)
class Experts(base.Mlp, base.RoutedExperts):
    """A mixture of experts: a weighted sum of the MLPs that a router selects for each token, and of a shared one.

    Memory: for each token, ``n_active`` rows of the inner and of the hidden size, in chunks of 8,192 tokens: 0.4 GB
    for Qwen3-30B-A3B and 0.6 GB for Mixtral 8x7B.
    """

    router: base.Linear
    """In float32 where it chooses by sigmoids."""
    gate_up: LinearWeights
    down: LinearWeights
    activation: ExpertActivation
    n_active: int
    normalizes: bool
    shared: SharedExpert | None = None
    sigmoid: SigmoidScores | None = None
    """How the router chooses by sigmoids; None: it chooses by a softmax."""
    scales: Tensor | None = None
    """[experts]: what the weights of the experts are multiplied by, after they are normalised."""
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.RowReader``."""
        return row_scales(self.gate_up.weight) if isinstance(self.gate_up.weight, Fp8Matrix) else None

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.RowReader``. The router does."""
        return True

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Mlp``."""
        return self._mixed(x, as_tensor(x), out)

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.RoutedExperts``."""
        return self._mixed(x, routed, out)

    def _mixed(self, x: Rows, routed: Tensor, out: Tensor | None) -> Tensor:
        out = torch.empty_like(as_tensor(x)) if out is None else out
        parts = self._chunks(x), routed.split(self.chunk_tokens), out.split(self.chunk_tokens)
        for rows, read, sums in zip(*parts, strict=True):
            sum_experts(*self._products(rows, read), sums)
            if self.shared is not None:
                self.shared.add(rows, sums)
        return out

    def _chunks(self, x: Rows) -> Sequence[Rows]:
        """Returns the rows of each chunk, in FP8 if experts read that. Those of several are rounded one by one."""
        unrounded = as_tensor(x)
        if len(unrounded) <= self.chunk_tokens:
            return [_rounded_for(self.gate_up.weight, x)]
        return [_rounded_for(self.gate_up.weight, one) for one in unrounded.split(self.chunk_tokens)]

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """See ``ops.base.Mlp``."""
        fields = norm.fused
        if fields is None or self.shared is not None:
            return norm.add(self(x), residual)
        out = rows_of(fields, residual)
        for index, rows in enumerate(self._chunks(x)):
            first = index * self.chunk_tokens
            last = min(first + self.chunk_tokens, len(residual))
            products, expert_weights = self._products(rows, as_tensor(rows))
            some = out[first:last] if isinstance(out, Tensor) else out.part(first, last)
            sum_experts(products, expert_weights, some, residual[first:last], fields)
        return out

    def _products(self, rows: Rows, routed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of each token's experts, [tokens * active, hidden], and their weights.

        Args:
            rows: [tokens, hidden], in FP8 if experts read that.
            routed: [tokens, hidden], what the router reads.
        """
        x, down = as_tensor(rows), self.down.weight
        assert not isinstance(down, Int4Matrix), "experts in 4 bits are dequantized"
        values = down.values if isinstance(down, Fp8Matrix) else down
        n_experts, hidden, n_inner = values.shape
        n_pairs = len(x) * self.n_active
        tiles = grouped_tiles(
            n_pairs,
            n_experts,
            values.itemsize,
            has_room=has_much_shared_memory(x),
            has_blocks=isinstance(down, Fp8Matrix) and down.has_blocks,
        )
        routing = route(
            self.router(routed if self.sigmoid is None else routed.float()),
            self.n_active,
            tiles.first.rows,
            normalizes=self.normalizes,
            dtype=x.dtype,
            sigmoid=self.sigmoid,
            scales=self.scales,
        )
        gated, products = x.new_empty(n_pairs, n_inner), x.new_empty(n_pairs, hidden)
        grouped_linear(rows, self.gate_up, routing, tiles.first, gated, self.activation)
        grouped_linear(_rounded_for(down, gated), self.down, routing, tiles.second, products)
        return products, routing.expert_weights


@dataclass(frozen=True)
class ExpertsBeside(base.ExpertsBeside):
    """Experts that compute the residual stream beside the MLP, which has a norm of its own before and after.

    The router reads the residual stream divided by its root mean square, times a weight, over the root of the size.
    """

    experts: base.RoutedExperts
    router_norm: RMSNorm
    norm: base.Norm
    """Of the experts' input."""
    after_mlp: base.Norm
    after_experts: base.Norm

    def __call__(self, computed: Tensor, residual: Tensor) -> Tensor:
        """See ``ops.base.ExpertsBeside``."""
        routed = as_tensor(self.router_norm(residual)).mul_(residual.shape[1] ** -0.5)
        mixed = self.experts.mixed(as_tensor(self.norm(residual)), routed)
        return as_tensor(self.after_mlp(computed)).add_(as_tensor(self.after_experts(mixed)))


@dataclass(frozen=True)
class LayerInput(base.LayerInput):
    """``norm(output(gelu(gate(residual)) * layer_input))``, with GELU's approximation by tanh."""

    gate: base.Linear
    output: base.Linear
    norm: base.Norm

    def __call__(self, residual: Tensor, layer_input: Tensor) -> Tensor:
        """See ``ops.base.LayerInput``."""
        gated = functional.gelu(self.gate(residual), approximate="tanh").mul_(layer_input)
        return as_tensor(self.norm(self.output(gated)))


def _rounded_for(weight: Matrix, x: Rows) -> Rows:
    """Returns ``x`` as a product with ``weight`` takes it: in FP8 if that is, beside what it was before."""
    assert not isinstance(weight, Int4Matrix), "experts in 4 bits are dequantized"
    if isinstance(x, Tensor) and isinstance(weight, Fp8Matrix):
        return replace(quantize_rows(x, row_scales(weight)), unrounded=x)
    return x
