"""Table of the supported model architectures: their differences from Llama and their tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

NormKind = Literal["rms", "rms_float32", "rms_plus_one", "layer"]
"""``rms_float32`` multiplies by the weight in float32, ``rms_plus_one`` by one plus the weight; ``layer`` subtracts
the mean and has a bias."""
Activation = Literal["silu", "gelu_tanh", "clamped_silu", "relu", "relu2"]
"""All but the last two are of a gate, which multiplies another product; with ``relu`` and its square there is none.
``clamped_silu`` is GPT-OSS's, with limits and another slope."""


@dataclass(frozen=True)
class WeightNames:
    """Tensor names of an architecture, without the suffix ``.weight`` or ``.bias``.

    ``{layer}`` and ``{expert}`` are placeholders for indices.
    """

    embedding: str = "model.embed_tokens"
    position_embedding: str = "model.embed_positions"
    layers: str = "model.layers."
    """Prefix of the names of all layers' tensors; the layer's index follows it."""
    attention_norm: str = "model.layers.{layer}.input_layernorm"
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    sinks: str = "model.layers.{layer}.self_attn.sinks"
    """Full name, without a suffix."""
    output: str = "model.layers.{layer}.self_attn.o_proj"
    after_attention_norm: str = "model.layers.{layer}.post_attention_layernorm"
    """Norm of attention's output, before it is added; of architectures with norms around each half of a layer."""
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    after_mlp_norm: str = "model.layers.{layer}.post_feedforward_layernorm"
    """Norm of the MLP's output, before it is added."""
    router: str = "model.layers.{layer}.mlp.gate"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    router_correction: str = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
    """Full name of what is added to the scores of a router by sigmoid before it chooses."""
    stacked_gate_up: str = "model.layers.{layer}.mlp.experts.gate_up_proj"
    """Full name of the gate and up projections of all experts, if they are one tensor."""
    stacked_down: str = "model.layers.{layer}.mlp.experts.down_proj"
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert.gate_proj"
    shared_up: str = "model.layers.{layer}.mlp.shared_expert.up_proj"
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj"
    shared_weight: str = "model.layers.{layer}.mlp.shared_expert_gate"
    """The projection to the weight of the shared expert."""
    router_scale: str = "model.layers.{layer}.router.scale"
    """Full name of what the router's input is multiplied by, of experts beside an MLP."""
    expert_scales: str = "model.layers.{layer}.router.per_expert_scale"
    """Full name of what the weights of the experts are multiplied by."""
    experts_norm: str = "model.layers.{layer}.pre_feedforward_layernorm_2"
    """Norm of the input of experts beside an MLP."""
    after_plain_mlp_norm: str = "model.layers.{layer}.post_feedforward_layernorm_1"
    """Norm of the output of an MLP with experts beside it."""
    after_experts_norm: str = "model.layers.{layer}.post_feedforward_layernorm_2"
    layer_embedding: str = "model.embed_tokens_per_layer"
    """Embedding of each token for each layer."""
    layer_inputs: str = "model.per_layer_model_projection"
    """Projection of token embeddings to the inputs of all layers."""
    layer_inputs_norm: str = "model.per_layer_projection_norm"
    layer_input_gate: str = "model.layers.{layer}.per_layer_input_gate"
    layer_input_output: str = "model.layers.{layer}.per_layer_projection"
    after_layer_input_norm: str = "model.layers.{layer}.post_per_layer_input_norm"
    layer_scale: str = "model.layers.{layer}.layer_scalar"
    """Full name of what the residual stream is multiplied by at the end of a layer."""
    recurrent: str = "model.layers.{layer}.linear_attn."
    """Prefix of the names of a recurrent layer's tensors."""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    unused: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    """Full names of tensors that older checkpoints contain and the decoder computes itself."""
    unused_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of parts that the decoder does not have, such as vision."""

    def nested(self, model: str) -> WeightNames:
        """Returns the names in a checkpoint that has the decoder as ``model`` instead of ``model.``."""
        changed: dict[str, Any] = {}
        for each in fields(self):
            name = getattr(self, each.name)
            if isinstance(name, str) and name.startswith("model."):
                changed[each.name] = model + name.removeprefix("model.")
        return replace(self, **changed)


@dataclass(frozen=True)
class ExpertFields:
    """Fields of ``config.json`` that describe the experts."""

    count: tuple[str, ...]
    """Alternative names of the field with the number of experts."""
    active: str = field(default="num_experts_per_tok", kw_only=True)
    """Name of the field with the number of experts that compute each token."""
    switch: str | None = field(default=None, kw_only=True)
    """Name of the field that says whether there are experts; None: there are."""
    routes_by_sigmoid: bool = field(default=False, kw_only=True)
    """Whether the router's scores are sigmoids, corrected where experts are chosen, perhaps in groups. The shared
    expert has no weight then."""
    are_beside_mlp: bool = field(default=False, kw_only=True)
    """Whether a layer has both an MLP and experts, whose outputs are added."""
    inner_size: str
    """Name of the field with the intermediate size of one expert."""
    normalizes: bool
    """Whether a token's expert weights always sum to 1; if False, the field ``norm_topk_prob`` decides."""
    default_normalizes: bool = False
    """What ``norm_topk_prob`` is where it is absent."""
    shared_inner_size: str | None = None
    """Name of the field with the intermediate size of the expert that computes every token; None: there is none."""
    are_stacked: bool = False
    """Whether a projection of all experts is one tensor [experts, in, out], with biases. Columns of the gate and of
    the projection that it multiplies then alternate, and the router has a bias."""


@dataclass(frozen=True)
class Architecture:
    """Differences of an architecture from Llama.

    Defaults are those of Transformers' configuration class, because checkpoints may leave such fields out.
    """

    names: WeightNames = WeightNames()
    has_query_key_value_bias: bool = False
    """Whether query, key and value have a bias even if ``attention_bias`` is not set."""
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    bias_switches: frozenset[str] = frozenset()
    """Which of the fields ``attention_bias`` and ``mlp_bias`` may be true."""
    default_attention_bias: bool = False
    """What ``attention_bias`` is where it is absent."""
    has_query_key_norm: bool = False
    has_value_norm: bool = False
    """Whether values have a norm over each head, without a weight."""
    norm: NormKind = "rms"
    has_sinks: bool = False
    """Whether each head has a score that takes part in the softmax and has no value."""
    has_norms_around: bool = False
    """Whether each half of a layer has a norm of its output too."""
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    """Field of ``config.json`` that names the activation."""
    activation_name: str = "silu"
    """The name there."""
    inner_size_field: str = "intermediate_size"
    default_layer_input_size: int | None = None
    """Values of a token's input of each layer where ``hidden_size_per_layer_input`` is absent; None: layers have
    none."""
    has_layer_scales: bool = False
    """Whether the residual stream is multiplied by a number at the end of each layer."""
    caps_logits: bool = False
    """Whether the field ``final_logit_softcapping`` limits logits."""
    scales_embedding: bool = False
    """Whether token embeddings are multiplied by the square root of the hidden size."""
    n_unused_positions: int | None = None
    """Leading rows of a learned position embedding that no position has; None: there is no such embedding."""
    window: Literal["never", "always", "switched", "by_layer", "patterned"] = "never"
    """Layers that use ``sliding_window``.

    ``never``: no layer. ``always``: all layers. ``switched``: all layers if ``use_sliding_window`` is true.
    ``by_layer``: if ``use_sliding_window`` is true, the layers selected by ``layer_types``, or without that field
    the layers from index ``max_window_layers`` on. ``patterned``: the layers selected by ``layer_types``, or
    without that field all but each ``sliding_window_pattern``-th.
    """
    default_window_pattern: int = 6
    attention_scale: float | None = None
    """Multiplier of the scores; None: it follows from ``default_attention_scalar``."""
    default_attention_scalar: int | None = None
    """The scores are divided by the square root of the field ``query_pre_attn_scalar``, or of this if it is absent;
    None: by that of the head size."""
    default_window: int | None = None
    """Window size where the field ``sliding_window`` is absent."""
    default_head_dim: int | None = None
    """Head size where the field ``head_dim`` is absent; None: the hidden size divided by the number of heads."""
    default_full_head_dim: int | None = None
    """Head size of layers with full attention where ``config.json`` has none; None: all layers have equal heads."""
    shares_kv: bool = False
    """Whether the last layers, as many as ``num_kv_shared_layers``, may read the K and V of others."""
    last_is_full: bool = False
    """Whether the last layer has full attention, whatever ``layer_types`` says."""
    default_n_kv_heads: int | None = None
    """Key-value heads where the field ``num_key_value_heads`` is absent, if they divide the query heads; None: as
    many as these."""
    default_rope_theta: float = 10_000.0
    default_local_rope_theta: float | None = None
    """Theta of layers with a window where ``config.json`` has none; None: all layers have the same angles."""
    default_rope_scaling: Mapping[str, object] | None = None
    """What ``rope_scaling`` is where ``config.json`` has neither it nor ``rope_parameters``."""
    default_tied_head: bool = False
    overflows_float16: bool = False
    """Whether activations exceed what float16 can hold."""
    rotary_factor: float = 1.0
    """Part of each head that is rotated where ``partial_rotary_factor`` is absent; with 1 no other is supported,
    and with 0 none is rotated."""
    has_output_gate: bool = False
    """Whether attention's output is multiplied by a gate, whose projection is beside that of the queries."""
    has_delta_nets: bool = False
    """Whether the field ``layer_types`` may name gated delta nets, ``linear_attention``."""
    has_halves: bool = False
    """Whether each layer is a Mamba2 layer, attention, an MLP or experts, and has one norm."""
    has_fused_delta_nets: bool = False
    """Whether the projections of a delta net's inputs are two tensors, whose rows are sorted by key head."""
    only: tuple[tuple[str, object], ...] = ()
    """Fields of which only one value is supported, with that value."""
    refused: tuple[tuple[str, object], ...] = ()
    """Values of fields that are not supported."""
    norm_eps_field: str = "rms_norm_eps"
    default_norm_eps: float = 1e-6
    experts: ExpertFields | None = None


_QWEN3 = Architecture(
    bias_switches=frozenset({"attention_bias"}),
    has_query_key_norm=True,
    window="by_layer",
    default_window=4096,
    default_head_dim=128,
    default_n_kv_heads=32,
)


def _with_vision(text: Architecture) -> Architecture:
    """Returns an architecture whose text model is another one; its vision is not used."""
    return replace(text, names=text.names.nested("model.language_model."))


_QWEN3_5 = Architecture(
    names=WeightNames(unused_prefixes=("mtp.", "model.visual.")),
    has_query_key_norm=True,
    norm="rms_plus_one",
    default_head_dim=256,
    default_n_kv_heads=4,
    rotary_factor=0.25,
    has_output_gate=True,
    has_delta_nets=True,
    only=(("attn_output_gate", True),),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    default_n_kv_heads=2,
    inner_size_field="moe_intermediate_size",  # no layer has a plain MLP
    experts=ExpertFields(
        ("num_experts",),
        "moe_intermediate_size",
        normalizes=True,
        shared_inner_size="shared_expert_intermediate_size",
    ),
)

_GEMMA4 = Architecture(
    names=WeightNames(
        mlp_norm="model.layers.{layer}.pre_feedforward_layernorm",
        router="model.layers.{layer}.router.proj",
        expert_gate="model.layers.{layer}.experts.{expert}.gate_proj",
        expert_up="model.layers.{layer}.experts.{expert}.up_proj",
        expert_down="model.layers.{layer}.experts.{expert}.down_proj",
        stacked_gate_up="model.layers.{layer}.experts.gate_up_proj",
        stacked_down="model.layers.{layer}.experts.down_proj",
        unused_prefixes=(
            *("model.vision_tower.", "model.vision_embedder.", "model.embed_vision."),
            *("model.audio_tower.", "model.embed_audio."),
        ),
    ),
    bias_switches=frozenset({"attention_bias"}),
    has_query_key_norm=True,
    has_value_norm=True,
    norm="rms_float32",
    has_norms_around=True,
    activation="gelu_tanh",
    activation_field="hidden_activation",
    activation_name="gelu_pytorch_tanh",
    default_layer_input_size=256,
    has_layer_scales=True,
    caps_logits=True,
    scales_embedding=True,
    attention_scale=1.0,
    window="patterned",
    default_window=512,
    last_is_full=True,
    default_head_dim=256,
    default_full_head_dim=512,
    default_n_kv_heads=4,
    shares_kv=True,
    default_rope_theta=1e6,
    default_local_rope_theta=10_000.0,
    default_rope_scaling=MappingProxyType({"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    overflows_float16=True,
    default_tied_head=True,
    refused=(("use_bidirectional_attention", "all"),),
    experts=ExpertFields(
        ("num_experts",),
        "moe_intermediate_size",
        normalizes=True,
        active="top_k_experts",
        switch="enable_moe_block",
        are_beside_mlp=True,
    ),
)

_GEMMA4_UNIFIED = replace(_GEMMA4, default_layer_input_size=None, default_window=1024, experts=None)

_NEMOTRON_LAYER = "backbone.layers.{layer}."
_OPT_LAYER = "model.decoder.layers.{layer}."

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "Gemma3ForCausalLM": Architecture(
            names=WeightNames(mlp_norm="model.layers.{layer}.pre_feedforward_layernorm"),
            bias_switches=frozenset({"attention_bias"}),
            has_query_key_norm=True,
            norm="rms_plus_one",
            has_norms_around=True,
            activation="gelu_tanh",
            activation_field="hidden_activation",
            activation_name="gelu_pytorch_tanh",
            scales_embedding=True,
            default_attention_scalar=256,
            window="patterned",
            default_window=4096,
            default_head_dim=256,
            default_n_kv_heads=4,
            default_rope_theta=1e6,
            default_local_rope_theta=10_000.0,
            overflows_float16=True,
            default_tied_head=True,
            only=(
                ("attn_logit_softcapping", None),
                ("final_logit_softcapping", None),
                ("use_bidirectional_attention", False),
            ),
        ),
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _with_vision(_GEMMA4),
        "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
        "Gemma4UnifiedForConditionalGeneration": _with_vision(_GEMMA4_UNIFIED),
        "LlamaForCausalLM": Architecture(bias_switches=frozenset({"attention_bias", "mlp_bias"})),
        "MistralForCausalLM": Architecture(window="always", default_window=4096, default_n_kv_heads=8),
        "MixtralForCausalLM": Architecture(
            names=WeightNames(
                router="model.layers.{layer}.block_sparse_moe.gate",
                expert_gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
                expert_up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
                expert_down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
            ),
            window="always",
            default_n_kv_heads=8,
            default_rope_theta=1e6,
            default_norm_eps=1e-5,
            experts=ExpertFields(("num_local_experts",), "intermediate_size", normalizes=True),
        ),
        "GptOssForCausalLM": Architecture(
            names=WeightNames(router="model.layers.{layer}.mlp.router"),
            bias_switches=frozenset({"attention_bias"}),
            default_attention_bias=True,
            has_sinks=True,
            activation="clamped_silu",
            window="patterned",
            default_window=128,
            default_window_pattern=2,
            default_head_dim=64,
            default_n_kv_heads=8,
            default_rope_theta=150_000.0,
            default_rope_scaling=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                }
            ),
            default_norm_eps=1e-5,
            experts=ExpertFields(("num_local_experts",), "intermediate_size", normalizes=True, are_stacked=True),
            only=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
        ),
        "NemotronHForCausalLM": Architecture(
            names=WeightNames(
                embedding="backbone.embeddings",
                layers="backbone.layers.",
                attention_norm=_NEMOTRON_LAYER + "norm",
                query=_NEMOTRON_LAYER + "mixer.q_proj",
                key=_NEMOTRON_LAYER + "mixer.k_proj",
                value=_NEMOTRON_LAYER + "mixer.v_proj",
                output=_NEMOTRON_LAYER + "mixer.o_proj",
                up=_NEMOTRON_LAYER + "mixer.up_proj",
                down=_NEMOTRON_LAYER + "mixer.down_proj",
                router=_NEMOTRON_LAYER + "mixer.gate",
                router_correction=_NEMOTRON_LAYER + "mixer.gate.e_score_correction_bias",
                expert_gate=_NEMOTRON_LAYER + "mixer.experts.{expert}.gate_proj",
                expert_up=_NEMOTRON_LAYER + "mixer.experts.{expert}.up_proj",
                expert_down=_NEMOTRON_LAYER + "mixer.experts.{expert}.down_proj",
                shared_up=_NEMOTRON_LAYER + "mixer.shared_experts.up_proj",
                shared_down=_NEMOTRON_LAYER + "mixer.shared_experts.down_proj",
                recurrent=_NEMOTRON_LAYER + "mixer.",
                final_norm="backbone.norm_f",
                unused=(),
                unused_prefixes=("mtp.",),
            ),
            bias_switches=frozenset({"mlp_bias"}),
            norm="rms_float32",
            activation="relu2",
            activation_field="mlp_hidden_act",
            activation_name="relu2",
            rotary_factor=0.0,
            has_halves=True,
            default_head_dim=128,
            default_n_kv_heads=8,
            norm_eps_field="layer_norm_epsilon",
            default_norm_eps=1e-5,
            experts=ExpertFields(
                ("n_routed_experts",),
                "moe_intermediate_size",
                normalizes=False,
                default_normalizes=True,
                shared_inner_size="moe_shared_expert_intermediate_size",
                routes_by_sigmoid=True,
            ),
            only=(
                *(("mamba_hidden_act", "silu"), ("use_bias", False), ("mamba_proj_bias", False)),
                ("moe_latent_size", None),
            ),
        ),
        "OPTForCausalLM": Architecture(
            names=WeightNames(
                embedding="model.decoder.embed_tokens",
                position_embedding="model.decoder.embed_positions",
                layers="model.decoder.layers.",
                attention_norm=_OPT_LAYER + "self_attn_layer_norm",
                query=_OPT_LAYER + "self_attn.q_proj",
                key=_OPT_LAYER + "self_attn.k_proj",
                value=_OPT_LAYER + "self_attn.v_proj",
                output=_OPT_LAYER + "self_attn.out_proj",
                mlp_norm=_OPT_LAYER + "final_layer_norm",
                up=_OPT_LAYER + "fc1",
                down=_OPT_LAYER + "fc2",
                final_norm="model.decoder.final_layer_norm",
                unused=(),
            ),
            has_query_key_value_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
            norm="layer",
            activation="relu",
            activation_field="activation_function",
            activation_name="relu",
            inner_size_field="ffn_dim",
            n_unused_positions=2,
            rotary_factor=0.0,
            default_norm_eps=1e-5,
            default_tied_head=True,
            only=(
                ("do_layer_norm_before", True),
                ("_remove_final_layer_norm", False),
                ("enable_bias", True),
                ("layer_norm_elementwise_affine", True),
            ),
        ),
        "Qwen2ForCausalLM": Architecture(
            has_query_key_value_bias=True, window="by_layer", default_window=4096, default_n_kv_heads=32
        ),
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": _with_vision(_QWEN3_5),
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": _with_vision(_QWEN3_5_MOE),
        "Qwen3ForCausalLM": _QWEN3,
        "Qwen3NextForCausalLM": replace(
            _QWEN3_5,
            default_n_kv_heads=2,
            has_fused_delta_nets=True,
            experts=ExpertFields(
                ("num_experts",),
                "moe_intermediate_size",
                normalizes=False,
                default_normalizes=True,
                shared_inner_size="shared_expert_intermediate_size",
            ),
        ),
        "Qwen3MoeForCausalLM": replace(
            _QWEN3,
            window="switched",
            default_head_dim=None,
            default_n_kv_heads=4,
            experts=ExpertFields(("num_experts", "num_local_experts"), "moe_intermediate_size", normalizes=False),
        ),
    }
)
"""Supported architectures by their name in the field ``architectures`` of ``config.json``."""
