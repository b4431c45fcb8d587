"""``config.json`` of a checkpoint -> what the decoder is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.runtime.device.spec.config_reader import Fields
from radixkv.runtime.device.spec.families import ARCHITECTURES, Architecture, ExpertFields, WeightNames
from radixkv.runtime.device.spec.rope import Rope

_MAX = 1000
"""Layers, and experts a layer. A corrupt file may count a billion, and what they need is listed."""
_WINDOWED, _WHOLE = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class ExpertConfig:
    """The layers whose MLP is a choice of several."""

    n_experts: int
    n_active: int
    """How many compute a token."""
    inner_size: int
    normalizes: bool
    """Whether the weights of a token's experts add up to 1."""
    sparse_step: int
    """Every so many layers has experts,"""
    dense_layers: frozenset[int]
    """but these have not."""


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's sizes and variants."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied_head: bool
    """The output head is the embedding."""
    has_query_key_value_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_query_key_norm: bool
    windows: tuple[int | None, ...]
    """By layer: how many tokens, itself included, a token sees; None for all."""
    experts: ExpertConfig | None

    @classmethod
    def parse(cls, config: Mapping[str, Any], path: Path) -> DecoderConfig:
        """Reads what a ``config.json`` of Transformers 4 or 5 holds; ``path`` is the file, for messages.

        Raises:
            CheckpointError: a field is missing or wrong, or asks for what this decoder does not do.
        """
        fields = Fields(config, path)
        name = _architecture(fields)
        architecture = ARCHITECTURES[name]
        fields.refuse(hidden_act="silu", quantization_config=None, partial_rotary_factor=1.0)
        biases = {switch: fields.flag(switch) for switch in architecture.bias_switches}
        fields.refuse(**{switch: False for switch in ("attention_bias", "mlp_bias") if switch not in biases})
        attention_bias = biases.get("attention_bias", False)
        hidden_size = fields.count("hidden_size")
        n_heads, n_kv_heads, head_dim = _heads(fields, architecture, hidden_size)
        n_layers = fields.count("num_hidden_layers", most=_MAX)
        return cls(
            architecture=name,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", architecture.default_norm_eps),
            rope=Rope.parse(fields, architecture.default_rope_theta),
            tied_head=fields.flag("tie_word_embeddings"),
            has_query_key_value_bias=architecture.has_query_key_value_bias or attention_bias,
            has_output_bias=attention_bias,
            has_mlp_bias=biases.get("mlp_bias", False),
            has_query_key_norm=architecture.has_query_key_norm,
            windows=_windows(fields, architecture, n_layers),
            experts=_experts(fields, architecture.experts) if architecture.experts else None,
        )

    @property
    def names(self) -> WeightNames:
        """What the checkpoint calls its tensors."""
        return ARCHITECTURES[self.architecture].names

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The layer's experts; None if its MLP is one."""
        experts = self.experts
        if experts is None or layer in experts.dense_layers or (layer + 1) % experts.sparse_step:
            return None
        return experts


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise fields.error(f"architectures is {named!r}; it must name one of {supported}")
    if named[0] not in ARCHITECTURES:
        raise fields.error(f"architecture {named[0]!r} is not supported; this release runs {supported}")
    return named[0]


def _heads(fields: Fields, architecture: Architecture, hidden_size: int) -> tuple[int, int, int]:
    """Heads, key heads and a head's size."""
    n_heads = fields.count("num_attention_heads")
    n_kv_heads = fields.count("num_key_value_heads", n_heads)
    head_dim = fields.count("head_dim", architecture.default_head_dim or hidden_size // n_heads)
    if n_heads % n_kv_heads:
        raise fields.error(f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}")
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    return n_heads, n_kv_heads, head_dim


def _windows(fields: Fields, architecture: Architecture, n_layers: int) -> tuple[int | None, ...]:
    window = _window(fields, architecture)
    kinds = fields.get("layer_types")
    if architecture.window != "by_layer":
        usual = _WHOLE if window is None else _WINDOWED
        if kinds is not None and kinds != [usual] * n_layers:
            raise fields.error(f"layer_types {kinds!r} is not supported for this architecture")
        return (window,) * n_layers
    if window is None:
        return (None,) * n_layers
    if kinds is None:
        first = fields.count("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(n_layers))
    if not isinstance(kinds, list) or not all(kind in (_WINDOWED, _WHOLE) for kind in kinds):
        raise fields.error(f"layer_types is {kinds!r}; it must be a list of {_WINDOWED!r} and {_WHOLE!r}")
    if len(kinds) != n_layers:
        raise fields.error(f"layer_types names {len(kinds)} layers; num_hidden_layers is {n_layers}")
    return tuple(window if kind == _WINDOWED else None for kind in kinds)


def _window(fields: Fields, architecture: Architecture) -> int | None:
    """The window of those layers that have one."""
    if architecture.window == "never":
        fields.refuse(sliding_window=None)
        return None
    if architecture.window != "always" and not fields.flag("use_sliding_window"):
        return None
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return None
    if architecture.default_window is None and "sliding_window" not in fields:
        return None
    return fields.count("sliding_window", architecture.default_window)


def _experts(fields: Fields, where: ExpertFields) -> ExpertConfig:
    count = next((name for name in where.count if fields.get(name) is not None), where.count[0])
    n_experts, n_active = fields.count(count, most=_MAX), fields.count("num_experts_per_tok")
    if n_active > n_experts:
        raise fields.error(f"num_experts_per_tok {n_active} is more than {count} {n_experts}")
    dense_layers = fields.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(layer) is int for layer in dense_layers):
        raise fields.error(f"mlp_only_layers is {dense_layers!r}; it must be a list of layers' indices")
    return ExpertConfig(
        n_experts=n_experts,
        n_active=n_active,
        inner_size=fields.count(where.inner_size),
        normalizes=where.normalizes or fields.flag("norm_topk_prob"),
        sparse_step=fields.count("decoder_sparse_step", 1),
        dense_layers=frozenset(dense_layers),
    )
