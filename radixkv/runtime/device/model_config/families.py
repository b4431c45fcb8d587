"""Table of the supported model architectures: their differences from Llama and their tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class WeightNames:
    """Tensor names of an architecture, without the suffix ``.weight`` or ``.bias``.

    ``{layer}`` and ``{expert}`` are placeholders for indices.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers."
    """Prefix of the names of all layers' tensors; the layer's index follows it."""
    attention_norm: str = "model.layers.{layer}.input_layernorm"
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    output: str = "model.layers.{layer}.self_attn.o_proj"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    router: str = "model.layers.{layer}.mlp.gate"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    unused: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Full names of tensors that older checkpoints contain and the decoder computes itself."""


@dataclass(frozen=True)
class ExpertFields:
    """Fields of ``config.json`` that describe the experts."""

    count: tuple[str, ...]
    """Alternative names of the field with the number of experts."""
    inner_size: str
    """Name of the field with the intermediate size of one expert."""
    normalizes: bool
    """Whether a token's expert weights always sum to 1; if False, the field ``norm_topk_prob`` decides."""


@dataclass(frozen=True)
class Architecture:
    """Differences of an architecture from Llama."""

    names: WeightNames = WeightNames()
    has_query_key_value_bias: bool = False
    """Whether query, key and value have a bias even if ``attention_bias`` is not set."""
    bias_switches: frozenset[str] = frozenset()
    """Which of the fields ``attention_bias`` and ``mlp_bias`` may be true."""
    has_query_key_norm: bool = False
    window: Literal["never", "always", "switched", "by_layer"] = "never"
    """Layers that use ``sliding_window``.

    ``never``: no layer. ``always``: all layers. ``switched``: all layers if ``use_sliding_window`` is true.
    ``by_layer``: if ``use_sliding_window`` is true, the layers selected by ``layer_types``, or without that field
    the layers from index ``max_window_layers`` on.
    """
    default_window: int | None = None
    """Window size where the field ``sliding_window`` is absent."""
    default_head_dim: int | None = None
    """Head size where the field ``head_dim`` is absent; None: the hidden size divided by the number of heads."""
    default_rope_theta: float = 10_000.0
    default_norm_eps: float = 1e-6
    experts: ExpertFields | None = None


_QWEN3 = Architecture(
    bias_switches=frozenset({"attention_bias"}),
    has_query_key_norm=True,
    window="by_layer",
    default_window=4096,
    default_head_dim=128,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(bias_switches=frozenset({"attention_bias", "mlp_bias"})),
        "MistralForCausalLM": Architecture(window="always", default_window=4096),
        "MixtralForCausalLM": Architecture(
            names=WeightNames(
                router="model.layers.{layer}.block_sparse_moe.gate",
                expert_gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
                expert_up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
                expert_down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
            ),
            window="always",
            default_rope_theta=1e6,
            default_norm_eps=1e-5,
            experts=ExpertFields(("num_local_experts",), "intermediate_size", normalizes=True),
        ),
        "Qwen2ForCausalLM": Architecture(has_query_key_value_bias=True, window="by_layer", default_window=4096),
        "Qwen3ForCausalLM": _QWEN3,
        "Qwen3MoeForCausalLM": replace(
            _QWEN3,
            window="switched",
            default_head_dim=None,
            experts=ExpertFields(("num_experts", "num_local_experts"), "moe_intermediate_size", normalizes=False),
        ),
    }
)
"""Supported architectures by their name in the field ``architectures`` of ``config.json``."""
