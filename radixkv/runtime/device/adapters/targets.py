"""The modules of a base model that an adapter may change."""

from __future__ import annotations

import re
from collections.abc import Sequence

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.errors import CheckpointError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.families import WeightNames
from radixkv.runtime.device.weights.shapes import layer_shapes, stored_projections

_USE = "use an adapter of attention's projections and dense MLPs alone"
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(?P<module>[0-9]+\..+)")
"""A module of a layer, whatever the model's own name is."""


def fitted(adapter: AdapterFolder, config: DecoderConfig) -> AdapterFolder:
    """Returns an adapter with the names that a base model has for its modules.

    Args:
        adapter: as it was opened.
        config: of the base model.

    Raises:
        CheckpointError: it changes a module that has no adapters, or does not fit the model.
    """
    shapes = target_shapes(config)
    for module in adapter.modules:
        match = _IN_LAYER.search(module)
        name = module if match is None else f"{config.names.layers}{match['module']}"
        if name not in shapes and (part := _part_without_adapters(name, config)) is not None:
            raise CheckpointError(
                f"the adapter in {adapter.path} changes {module}, and {part} have no adapters in this release; "
                f"{_USE}"
            )
    return adapter.for_base(config.names.layers, shapes)


def target_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the modules that adapters may change, by name, each with its numbers of outputs and inputs."""
    names, targets = config.names, dict[str, tuple[int, ...]]()
    for layer in range(config.n_layers):
        modules: list[str] = []
        if layer in config.attention_layers:
            modules += [names.query, *stored_projections(config, layer), names.output]
        if config.has_plain_mlp(layer):
            modules += [*([names.gate] if config.has_gate else []), names.up, names.down]
        shapes = layer_shapes(config, layer)
        for module in (one.format(layer=layer) for one in modules):
            targets[module] = shapes[f"{module}.weight"]
    return targets


def _part_without_adapters(module: str, config: DecoderConfig) -> str | None:
    """Returns what a module is of that adapters may not change; None if the model has no such part."""
    names, recurrent = config.names, config.recurrent
    if module.endswith(("embed_tokens", "wte")) or module in (names.embedding, names.head):
        return "the embedding and the output head"
    parts = [part for each in (names, WeightNames()) for part in _expert_parts(each, names.layers)]
    if config.experts is not None and _is_within(module, parts, range(config.n_layers)):
        return "experts and their routers"
    if recurrent is not None and _is_within(module, (names.recurrent,), recurrent.layers):
        return "recurrent layers"
    return None


def _expert_parts(names: WeightNames, layers: str) -> list[str]:
    """Returns names of experts and routers: checkpoints may have others than Transformers has for its modules.

    Args:
        names: of an architecture.
        layers: beginning of the names of all layers' tensors.
    """
    experts = names.expert_up.partition("{expert}")[0]
    parts = experts, names.router, names.shared_gate, names.shared_up, names.shared_down, names.shared_weight
    return [f"{layers}{{layer}}.{part.partition('{layer}.')[2]}" for part in parts]


def _is_within(module: str, parts: Sequence[str], layers: range | frozenset[int]) -> bool:
    """Returns whether a module is one of these parts of one of these layers, or within one."""
    owners = (part.format(layer=layer).rstrip(".") for part in parts for layer in layers)
    return any(module == owner or module.startswith(f"{owner}.") for owner in owners)
