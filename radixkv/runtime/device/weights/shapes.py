"""Names and shapes of the tensors that a decoder reads from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.states import RecurrentConfig

TensorShapes = dict[str, tuple[int, ...]]
"""Tensor shapes by full name."""


def tensor_shapes(config: DecoderConfig) -> TensorShapes:
    """Returns the shapes of all tensors that the checkpoint must contain."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: TensorShapes = {
        f"{config.names.embedding}.weight": vocabulary,
        **_norm_shapes(config, config.names.final_norm),
    }
    if config.n_positions is not None:
        n_rows = config.n_positions + config.n_unused_positions
        shapes[f"{config.names.position_embedding}.weight"] = (n_rows, config.hidden_size)
    if (inputs := config.layer_inputs) is not None:
        n_values = config.n_layers * inputs.size
        shapes[f"{config.names.layer_embedding}.weight"] = (inputs.vocab_size, n_values)
        shapes[f"{config.names.layer_inputs}.weight"] = (n_values, config.hidden_size)
        shapes[f"{config.names.layer_inputs_norm}.weight"] = (inputs.size,)
    if not config.tied_head:
        shapes[f"{config.names.head}.weight"] = vocabulary
    for layer in range(config.n_layers):
        shapes |= layer_shapes(config, layer)
    return shapes


def _norm_shapes(config: DecoderConfig, name: str) -> TensorShapes:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


def layer_shapes(config: DecoderConfig, layer: int) -> TensorShapes:
    """Returns the shapes of the tensors of one layer."""
    names, hidden = config.names, config.hidden_size
    shapes: TensorShapes = {}

    def head_norm(name: str) -> None:
        shapes[f"{name.format(layer=layer)}.weight"] = (heads.head_dim,)

    def norm(name: str) -> None:
        shapes.update(_norm_shapes(config, name.format(layer=layer)))

    def linear(name: str, n_outputs: int, n_inputs: int, *, bias: bool = False, expert: int = 0) -> None:
        full = name.format(layer=layer, expert=expert)
        shapes[f"{full}.weight"] = (n_outputs, n_inputs)
        if bias:
            shapes[f"{full}.bias"] = (n_outputs,)

    heads = config.heads[layer]
    query, key = config.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    norm(names.attention_norm)
    if not config.has_mixer(layer):
        pass
    elif config.recurrent is not None and layer in config.recurrent.layers:
        shapes |= _delta_net_shapes(config.recurrent, names.recurrent.format(layer=layer), hidden)
    else:
        n_gates = query if config.has_output_gate else 0
        linear(names.query, query + n_gates, hidden, bias=config.has_query_key_value_bias)
        for name in stored_projections(config, layer):
            linear(name, key, hidden, bias=config.has_query_key_value_bias)
        if config.has_query_key_norm:
            head_norm(names.query_norm)
            if heads.source is None:
                head_norm(names.key_norm)
        if config.has_sinks:
            shapes[names.sinks.format(layer=layer)] = (config.n_heads,)
        linear(names.output, hidden, query, bias=config.has_output_bias)
    if not config.has_mlp(layer):
        return shapes
    if config.halves is None:
        norm(names.mlp_norm)
    if config.has_norms_around:
        norm(names.after_attention_norm)
        norm(names.after_mlp_norm)
    if config.layer_inputs is not None:
        linear(names.layer_input_gate, config.layer_inputs.size, hidden)
        linear(names.layer_input_output, hidden, config.layer_inputs.size)
        norm(names.after_layer_input_norm)
    if config.has_layer_scales:
        shapes[names.layer_scale.format(layer=layer)] = (1,)
    experts = config.experts_of(layer)
    if config.has_plain_mlp(layer):
        n_inner = config.inner_size_of(layer)
        if config.has_gate:
            linear(names.gate, n_inner, hidden, bias=config.has_mlp_bias)
        linear(names.up, n_inner, hidden, bias=config.has_mlp_bias)
        linear(names.down, hidden, n_inner, bias=config.has_mlp_bias)
    if experts is None:
        return shapes
    if experts.are_beside_mlp:
        shapes[names.router_scale.format(layer=layer)] = (hidden,)
        shapes[names.expert_scales.format(layer=layer)] = (experts.n_experts,)
        for name in (names.experts_norm, names.after_plain_mlp_norm, names.after_experts_norm):
            norm(name)
    linear(names.router, experts.n_experts, hidden, bias=experts.are_stacked)
    if (n_shared := experts.shared_inner_size) is not None:
        if experts.sigmoid is None:
            linear(names.shared_weight, 1, hidden)
        if config.has_gate:
            linear(names.shared_gate, n_shared, hidden)
        linear(names.shared_up, n_shared, hidden, bias=config.has_mlp_bias)
        linear(names.shared_down, hidden, n_shared, bias=config.has_mlp_bias)
    if experts.sigmoid is not None:
        shapes[names.router_correction.format(layer=layer)] = (experts.n_experts,)
    if experts.are_stacked:
        n_inner = experts.inner_size
        for name, n_inputs, n_outputs in (
            (names.stacked_gate_up, hidden, 2 * n_inner),
            (names.stacked_down, n_inner, hidden),
        ):
            full = name.format(layer=layer)
            shapes[full] = (experts.n_experts, n_inputs, n_outputs)
            shapes[f"{full}_bias"] = (experts.n_experts, n_outputs)
        return shapes
    for expert in range(experts.n_experts):
        if config.has_gate:
            linear(names.expert_gate, experts.inner_size, hidden, expert=expert)
        linear(names.expert_up, experts.inner_size, hidden, expert=expert)
        linear(names.expert_down, hidden, experts.inner_size, expert=expert)
    return shapes


def stored_projections(config: DecoderConfig, layer: int) -> tuple[str, ...]:
    """Returns the names of the projections to K and V that a layer has."""
    heads, names = config.heads[layer], config.names
    if heads.source is not None:
        return ()
    return (names.key, names.value) if heads.has_values else (names.key,)


def _delta_net_shapes(config: RecurrentConfig, prefix: str, hidden: int) -> TensorShapes:
    shapes: TensorShapes
    n_values = config.n_value_heads * config.value_dim
    n_heads = config.n_value_heads
    if config.mamba2 is not None:
        shapes = {
            "in_proj.weight": (n_values + config.n_channels + n_heads, hidden),
            "conv1d.weight": (config.n_channels, 1, config.n_taps),
            **({"conv1d.bias": (config.n_channels,)} if config.mamba2.has_convolution_bias else {}),
            "A_log": (n_heads,),
            "dt_bias": (n_heads,),
            "D": (n_heads,),
            "norm.weight": (n_values,),
            "out_proj.weight": (hidden, n_values),
        }
        return {f"{prefix}{name}": shape for name, shape in shapes.items()}
    if config.is_fused:
        inputs = {"qkvz": config.n_channels + n_values, "ba": 2 * n_heads}
    else:
        inputs = {"qkv": config.n_channels, "z": n_values, "b": n_heads, "a": n_heads}
    shapes = {
        **{f"in_proj_{part}.weight": (n_rows, hidden) for part, n_rows in inputs.items()},
        "conv1d.weight": (config.n_channels, 1, config.n_taps),
        "A_log": (config.n_value_heads,),
        "dt_bias": (config.n_value_heads,),
        "norm.weight": (config.value_dim,),
        "out_proj.weight": (hidden, n_values),
    }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def row_sections(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the tensors whose rows are several sections, of each of which a rank has a part: the rows of each.

    They are the queries, keys and values of gated delta nets, before and in their convolution. In fused inputs each
    key head has its rows side by side. Mamba2's one projection has the gate, x, B, C and the time steps, and its
    convolution x, B and C.
    """
    recurrent = config.recurrent
    sections: dict[str, tuple[int, ...]] = {}
    if recurrent is None:
        return sections
    n_keys, n_values = recurrent.n_key_heads * recurrent.key_dim, recurrent.n_value_heads * recurrent.value_dim
    for layer in recurrent.layers:
        prefix = config.names.recurrent.format(layer=layer)
        if recurrent.mamba2 is not None:
            channels = (n_values, n_keys, n_keys)
            sections[f"{prefix}in_proj.weight"] = (n_values, *channels, recurrent.n_value_heads)
            sections |= {f"{prefix}conv1d.{part}": channels for part in ("weight", "bias")}
            continue
        for name in ("conv1d",) if recurrent.is_fused else ("conv1d", "in_proj_qkv"):
            sections[f"{prefix}{name}.weight"] = (n_keys, n_keys, n_values)
    return sections


@dataclass(frozen=True)
class ExpertStack:
    """A tensor of all experts, in place of which a checkpoint may have one tensor of each expert."""

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int | slice, ...]]
    """Where in it the tensors of each expert are, by name."""


def expert_stacks(config: DecoderConfig) -> dict[str, ExpertStack]:
    """Returns the stacks by name; none for architectures that have nothing else."""
    stacks: dict[str, ExpertStack] = {}
    names, hidden = config.names, config.hidden_size
    for layer in range(config.n_layers):
        experts = config.experts_of(layer)
        if experts is None or experts.are_stacked or not config.has_gate:
            continue
        n, n_inner = experts.n_experts, experts.inner_size
        gates, ups, downs = (
            [f"{name.format(layer=layer, expert=expert)}.weight" for expert in range(n)]
            for name in (names.expert_gate, names.expert_up, names.expert_down)
        )
        stacks[names.stacked_gate_up.format(layer=layer)] = ExpertStack(
            (n, 2 * n_inner, hidden),
            {name: (expert, slice(n_inner)) for expert, name in enumerate(gates)}
            | {name: (expert, slice(n_inner, None)) for expert, name in enumerate(ups)},
        )
        stacks[names.stacked_down.format(layer=layer)] = ExpertStack(
            (n, hidden, n_inner), {name: (expert,) for expert, name in enumerate(downs)}
        )
    return stacks


def optional_tensors(config: DecoderConfig, stored: frozenset[str]) -> frozenset[str]:
    """Returns the names of tensors that a checkpoint may contain although the decoder does not use them.

    Args:
        config: of the model.
        stored: names of all tensors in the files.
    """
    names = config.names
    unused = {name.format(layer=layer) for name in names.unused for layer in range(config.n_layers)}
    # Layers that read the K and V of others have projections to their own in published checkpoints.
    projections = tuple(
        f"{name.format(layer=layer)}."
        for layer in range(config.n_layers)
        if config.heads[layer].source is not None
        for name in (names.key, names.value, names.key_norm)
    )
    unused |= {name for name in stored if name.startswith((*names.unused_prefixes, *projections))}
    return frozenset(unused | {f"{names.head}.weight"}) if config.tied_head else frozenset(unused)
