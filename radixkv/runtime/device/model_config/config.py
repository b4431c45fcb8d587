"""Parser of a checkpoint's ``config.json`` into the decoder's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config_reader import MAX_COUNT, ConfigReader
from radixkv.runtime.device.model_config.experts import ExpertConfig, parse_experts
from radixkv.runtime.device.model_config.families import (
    ARCHITECTURES,
    Activation,
    Architecture,
    NormKind,
    WeightNames,
)
from radixkv.runtime.device.model_config.halves import Half, parse_halves
from radixkv.runtime.device.model_config.heads import LayerHeads, parse_heads
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.model_config.states import RecurrentConfig, parse_delta_nets, parse_mamba2
from radixkv.runtime.device.model_config.windows import FULL, SLIDING, parse_windows

_LINEAR = "linear_attention"
"""Value of the field ``layer_types``."""


@dataclass(frozen=True)
class LayerInputsConfig:
    """Configuration of the inputs that layers have beside the residual stream, Gemma 4's per-layer embeddings."""

    size: int
    """Values of a token's input of one layer."""
    vocab_size: int
    """Rows of the embedding for them."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of the decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    """Query heads of each layer's attention."""
    heads: tuple[LayerHeads, ...]
    """[layers]: the other heads. What a layer without attention has there is not used."""
    norm_eps: float
    norm: NormKind
    has_norms_around: bool
    """Whether each half of a layer has a norm of its output too."""
    activation: Activation
    embedding_scale: float | None
    """Multiplier of token embeddings."""
    n_positions: int | None
    """Positions of the learned position embedding; None: there is none."""
    n_unused_positions: int
    """Leading rows of the learned position embedding that no position has."""
    rope: Rope | None
    """Rotary embedding; None: positions are learned, or layers do not see them."""
    local_rope: Rope | None
    """Rotary embedding of layers with a window."""
    attention_scale: float
    """Multiplier of attention's scores."""
    has_sinks: bool
    """Whether each head has a score that takes part in the softmax and has no value."""
    tied_head: bool
    """Whether the output head shares the embedding's weight."""
    has_query_key_value_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_query_key_norm: bool
    has_value_norm: bool
    """Whether values have a norm over each head, without a weight."""
    windows: tuple[int | None, ...]
    """[layers]: sliding window in tokens, the token itself included; None: full attention."""
    experts: ExpertConfig | None
    wide_layers: frozenset[int]
    """Indices of layers whose MLP is twice as wide."""
    layer_inputs: LayerInputsConfig | None
    """Inputs of each layer beside the residual stream; None: there are none."""
    has_layer_scales: bool
    """Whether the residual stream is multiplied by a number at the end of each layer."""
    logit_cap: float | None
    """Logits are ``cap * tanh(logits / cap)``; None: they are not limited."""
    has_output_gate: bool
    """Whether attention's output is multiplied by a gate."""
    recurrent: RecurrentConfig | None
    """The layers that have a state in place of K and V; None: there are none."""
    halves: tuple[Half, ...] | None = None
    """[layers]: which half of a layer each is; None: all have both halves."""

    @classmethod
    def parse(cls, config: Mapping[str, Any], path: Path) -> DecoderConfig:
        """Parses a ``config.json`` of Transformers 4 or 5; ``path`` is the file named in error messages.

        Raises:
            CheckpointError: a field is missing, invalid or not supported by this decoder.
        """
        fields = ConfigReader(config, path)
        name = _architecture(fields)
        architecture = ARCHITECTURES[name]
        fields.allow_only(**dict(architecture.only))
        fields.refuse(**dict(architecture.refused))
        fields.allow_only(**{architecture.activation_field: architecture.activation_name})
        default_biases = {"attention_bias": architecture.default_attention_bias, "mlp_bias": False}
        biases = {name: fields.flag(name, default=default_biases[name]) for name in architecture.bias_switches}
        fields.allow_only(**{switch: False for switch in ("attention_bias", "mlp_bias") if switch not in biases})
        attention_bias = biases.get("attention_bias", False)
        hidden_size = fields.count("hidden_size")
        halves = parse_halves(fields, MAX_COUNT) if architecture.has_halves else None
        n_layers = len(halves) if halves else fields.count("num_hidden_layers", maximum=MAX_COUNT)
        recurrent = parse_delta_nets(fields, architecture, n_layers) if architecture.has_delta_nets else None
        if halves is not None:
            recurrent = parse_mamba2(fields, halves)
        windows = (None,) * n_layers if recurrent else parse_windows(fields, architecture, n_layers)
        fields, rotary_factor = _rotary_factor(fields, architecture)
        n_heads, heads = parse_heads(fields, architecture, windows, hidden_size, rotary_factor)
        rope, local_rope = _ropes(fields, architecture)
        if architecture.n_unused_positions is not None:
            fields.allow_only(word_embed_proj_dim=hidden_size)
        return cls(
            architecture=name,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count(architecture.inner_size_field),
            n_layers=n_layers,
            n_heads=n_heads,
            heads=heads,
            norm_eps=fields.number(architecture.norm_eps_field, architecture.default_norm_eps),
            norm=architecture.norm,
            has_norms_around=architecture.has_norms_around,
            activation=architecture.activation,
            embedding_scale=hidden_size**0.5 if architecture.scales_embedding else None,
            n_positions=None
            if architecture.n_unused_positions is None
            else fields.count("max_position_embeddings"),
            n_unused_positions=architecture.n_unused_positions or 0,
            rope=rope,
            local_rope=local_rope,
            attention_scale=_attention_scale(fields, architecture, heads[0].head_dim),
            has_sinks=architecture.has_sinks,
            tied_head=fields.flag("tie_word_embeddings", default=architecture.default_tied_head),
            has_query_key_value_bias=architecture.has_query_key_value_bias or attention_bias,
            has_output_bias=architecture.has_output_bias or attention_bias,
            has_mlp_bias=architecture.has_mlp_bias or biases.get("mlp_bias", False),
            has_query_key_norm=architecture.has_query_key_norm,
            has_value_norm=architecture.has_value_norm,
            windows=windows,
            experts=parse_experts(fields, architecture.experts)
            if architecture.experts and (halves is None or "experts" in halves)
            else None,
            wide_layers=_wide_layers(fields, heads) if architecture.shares_kv else frozenset(),
            layer_inputs=_layer_inputs(fields, architecture),
            has_layer_scales=architecture.has_layer_scales,
            logit_cap=_logit_cap(fields) if architecture.caps_logits else None,
            has_output_gate=architecture.has_output_gate,
            recurrent=recurrent,
            halves=halves,
        )

    def shard(self, n_ranks: int) -> DecoderConfig:
        """Returns the decoder that each of several ranks computes: it has some of the heads, and some of the values
        inside each MLP. Where there are fewer KV heads than ranks, each has one, and several have the same.

        Raises:
            ConfigError: ``n_ranks`` does not divide them.
        """
        recurrent, experts = self.recurrent, self.experts
        divided = {"num_attention_heads": self.n_heads}
        if recurrent is not None:
            divided["linear_num_key_heads" if recurrent.mamba2 is None else "n_groups"] = recurrent.n_key_heads
        if any(self.has_plain_mlp(layer) for layer in range(self.n_layers)):
            divided["intermediate_size"] = self.intermediate_size
        if experts is not None:
            divided["the experts' intermediate size"] = experts.inner_size
            if experts.shared_inner_size is not None:
                divided["the shared expert's intermediate size"] = experts.shared_inner_size
        for what, n in divided.items():
            if n % n_ranks:
                raise ConfigError(f"tensor_parallel_size {n_ranks} does not divide {what}, {n}; use one that does")
        for n in sorted({self.heads[layer].n_kv_heads for layer in self.attention_layers}, reverse=True):
            if n % n_ranks and n_ranks % n:
                raise ConfigError(
                    f"tensor_parallel_size {n_ranks} and num_key_value_heads {n}: neither divides the other; use "
                    "another size"
                )
        return replace(
            self,
            n_heads=self.n_heads // n_ranks,
            heads=tuple(replace(one, n_kv_heads=max(1, one.n_kv_heads // n_ranks)) for one in self.heads),
            intermediate_size=self.intermediate_size // n_ranks,
            experts=None if experts is None else experts.shard(n_ranks),
            recurrent=None if recurrent is None else recurrent.shard(n_ranks),
        )

    def n_page_parts(self, n_ranks: int) -> int:
        """Returns how many different parts of a page so many ranks have; more ranks have the same ones.

        Where layers have different numbers of KV heads, a part has what each rank has of any layer.
        """
        return lcm(*(min(n_ranks, self.heads[layer].n_kv_heads) for layer in self.stored_layers))

    @property
    def names(self) -> WeightNames:
        """Names of the checkpoint's tensors."""
        return ARCHITECTURES[self.architecture].names

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head size of the layers with attention, each shape once, in the order of the layers."""
        heads = (self.heads[layer] for layer in self.attention_layers)
        return tuple(dict.fromkeys((one.n_kv_heads, one.head_dim) for one in heads))

    @property
    def n_kv_heads(self) -> int:
        """KV heads of each layer, where all have the same."""
        (n_kv_heads,) = {heads.n_kv_heads for heads in self.heads}
        return n_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of each head, where all layers have the same."""
        (head_dim,) = {heads.head_dim for heads in self.heads}
        return head_dim

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have K and V of their own."""
        return tuple(layer for layer in self.attention_layers if self.heads[layer].source is None)

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V that are stored for a token."""
        return sum(2 * self.heads[layer].n_kv_heads * self.heads[layer].head_dim for layer in self.stored_layers)

    def inner_size_of(self, layer: int) -> int:
        """Returns the intermediate size of a layer's MLP."""
        return self.intermediate_size * (2 if layer in self.wide_layers else 1)

    @property
    def has_gate(self) -> bool:
        """Whether the MLP has a gate beside the projection that it multiplies."""
        return self.activation not in ("relu", "relu2")

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rotary embedding of a layer."""
        return self.rope if self.windows[layer] is None else self.local_rope

    def windows_within(self, max_model_len: int) -> tuple[int | None, ...]:
        """Returns the windows of layers with attention, None for each that no sequence of ``max_model_len`` tokens
        exceeds."""
        windows = (self.windows[layer] for layer in self.attention_layers)
        return tuple(window if window and window < max_model_len else None for window in windows)

    def has_one_shape_of_each_kind(self, max_model_len: int) -> bool:
        """Returns whether the layers with windows have K and V of one shape, and the other layers with attention,
        too, where the windows are those of ``windows_within``."""
        kinds: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        for layer, window in zip(self.attention_layers, self.windows_within(max_model_len), strict=True):
            kinds[window is None].add((self.heads[layer].n_kv_heads, self.heads[layer].head_dim))
        return all(len(shapes) <= 1 for shapes in kinds.values())

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention, which read K and V."""
        if self.halves is not None:
            return tuple(layer for layer, half in enumerate(self.halves) if half == "attention")
        others = () if self.recurrent is None else self.recurrent.layers
        return tuple(layer for layer in range(self.n_layers) if layer not in others)

    def has_mixer(self, layer: int) -> bool:
        """Returns whether a layer has attention or a state."""
        return self.halves is None or self.halves[layer] in ("attention", "recurrent")

    def has_mlp(self, layer: int) -> bool:
        """Returns whether a layer has an MLP or experts."""
        return self.halves is None or not self.has_mixer(layer)

    def has_plain_mlp(self, layer: int) -> bool:
        """Returns whether a layer has an MLP, be it beside experts."""
        experts = self.experts_of(layer)
        return self.has_mlp(layer) and (experts is None or experts.are_beside_mlp)

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """Returns the configuration of the layer's experts, None if the layer has a plain MLP."""
        experts = self.experts
        if self.halves is not None:
            return experts if self.halves[layer] == "experts" else None
        if experts is None or layer in experts.dense_layers or (layer + 1) % experts.sparse_step:
            return None
        return experts


def _architecture(fields: ConfigReader) -> str:
    names = fields.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error(f"architectures is {names!r}; it must name one of {supported}")
    if names[0] not in ARCHITECTURES:
        advice = (
            "; a decoder without an output head makes embeddings: --task embed"
            if names[0].endswith("Model")
            else ""
        )
        raise fields.error(f"architecture {names[0]!r} is not supported; this release supports {supported}{advice}")
    return names[0]


def _rotary_factor(fields: ConfigReader, architecture: Architecture) -> tuple[ConfigReader, float]:
    """Returns which part of each head is rotated, and the fields without it."""
    if architecture.rotary_factor in (0.0, 1.0):
        fields.allow_only(partial_rotary_factor=1.0)
        return fields, architecture.rotary_factor
    section = fields.get("rope_parameters")
    section = {} if not isinstance(section, Mapping) else dict(section)
    default = fields.number("partial_rotary_factor", architecture.rotary_factor)
    factor = fields.nested(section).number("partial_rotary_factor", default)
    if not 0.0 < factor <= 1.0:
        raise fields.error(f"partial_rotary_factor is {factor:g}; it must be above 0 and at most 1")
    section.pop("partial_rotary_factor", None)
    return fields.with_value("rope_parameters", section or None), factor


def _ropes(fields: ConfigReader, architecture: Architecture) -> tuple[Rope | None, Rope | None]:
    """Returns the rotary embeddings of layers without and with a window."""
    if not architecture.rotary_factor:
        return None, None
    scaling = architecture.default_rope_scaling
    if scaling is not None and not fields.get("rope_scaling") and fields.get("rope_parameters") is None:
        fields = fields.with_value("rope_scaling", scaling)
    if architecture.default_local_rope_theta is None:
        rope = Rope.parse(fields, architecture.default_rope_theta)
        return rope, rope
    sections = fields.get("rope_parameters")
    if isinstance(sections, Mapping) and isinstance(sections.get(FULL), Mapping):  # Transformers 5
        full, sliding = (fields.with_value("rope_parameters", sections.get(name)) for name in (FULL, SLIDING))
    else:
        theta = fields.get("rope_local_base_freq")
        full, sliding = fields, fields.nested({"rope_theta": theta})
    return (
        Rope.parse(full, architecture.default_rope_theta),
        Rope.parse(sliding, architecture.default_local_rope_theta),
    )


def _attention_scale(fields: ConfigReader, architecture: Architecture, head_dim: int) -> float:
    if architecture.attention_scale is not None:
        return architecture.attention_scale
    if architecture.default_attention_scalar is None:
        return float(head_dim**-0.5)
    return float(fields.number("query_pre_attn_scalar", architecture.default_attention_scalar) ** -0.5)


def _wide_layers(fields: ConfigReader, heads: Sequence[LayerHeads]) -> frozenset[int]:
    """Returns the layers whose MLP is twice as wide: none, or those that read the K and V of others."""
    if not fields.flag("use_double_wide_mlp"):
        return frozenset()
    return frozenset(layer for layer, one in enumerate(heads) if one.source is not None)


def _layer_inputs(fields: ConfigReader, architecture: Architecture) -> LayerInputsConfig | None:
    if architecture.default_layer_input_size is None:
        return None
    size = fields.count("hidden_size_per_layer_input", architecture.default_layer_input_size, minimum=0)
    if not size:
        return None
    name = "vocab_size_per_layer_input"
    vocab_size, n_tokens = fields.count(name, 262_144), fields.count("vocab_size")
    if vocab_size < n_tokens:
        raise fields.error(f"{name} {vocab_size} is less than vocab_size {n_tokens}, which is not supported")
    return LayerInputsConfig(size, vocab_size)


def _logit_cap(fields: ConfigReader) -> float | None:
    name = "final_logit_softcapping"
    return None if fields.get(name) is None else fields.number(name)
