"""The checkpoints that the decoder covers: how each differs, and what it calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class WeightNames:
    """What an architecture calls each tensor, without ``.weight`` or ``.bias``.

    ``{layer}`` and ``{expert}`` stand for indices.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers."
    """How the names of all layers' tensors begin; a layer's index follows."""
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
    """Full names of tensors of older checkpoints that are computed instead."""


@dataclass(frozen=True)
class ExpertFields:
    """Where ``config.json`` describes the experts."""

    count: tuple[str, ...]
    """The field with their number, under any of these names."""
    inner_size: str
    normalizes: bool
    """Whether the weights of a token's experts always add up to 1; else ``norm_topk_prob`` says."""


@dataclass(frozen=True)
class Architecture:
    """How a checkpoint differs from Llama."""

    names: WeightNames = WeightNames()
    has_query_key_value_bias: bool = False
    """Whatever ``attention_bias`` says."""
    bias_switches: frozenset[str] = frozenset()
    """Which of ``attention_bias`` and ``mlp_bias`` may be true."""
    has_query_key_norm: bool = False
    window: Literal["never", "always", "switched", "by_layer"] = "never"
    """Where ``sliding_window`` holds: nowhere; in all layers; in all if ``use_sliding_window``; or, if that, in
    those that ``layer_types`` names or that come after ``max_window_layers``."""
    default_window: int | None = None
    """The window where there is no field ``sliding_window``."""
    default_head_dim: int | None = None
    """None: the hidden size divided by the heads."""
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
"""By the name in ``architectures`` of ``config.json``."""
