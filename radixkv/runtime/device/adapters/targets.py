"""The modules of a base model that an adapter may change."""

from __future__ import annotations

from radixkv.errors import CheckpointError
from radixkv.runtime.device.adapters.adapter import Adapter
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.shapes import TensorShapes, stored_projections, tensor_shapes

_USE = "use an adapter of attention's projections and dense MLPs alone"


def check_adapter(adapter: Adapter, name: str, config: DecoderConfig) -> None:
    """Checks that an adapter changes only what adapters may change, in a base model of its sizes.

    Args:
        adapter: the adapter.
        name: under which users know it.
        config: of the base model.

    Raises:
        CheckpointError: it changes another module, or a module has another shape in the base model.
    """
    shapes, targets = tensor_shapes(config), _targets(config)
    for module, shape in adapter.modules.items():
        if module not in targets:
            raise CheckpointError(f"adapter {name!r} changes {module}: {_why_not(module, config, shapes)}")
        n_out, n_in = shapes[f"{module}.weight"]
        if (shape.n_out, shape.n_in) != (n_out, n_in):
            raise CheckpointError(
                f"adapter {name!r} has {shape.n_in} inputs and {shape.n_out} outputs of {module}, and the model has "
                f"{n_in} and {n_out}: it is an adapter of another model; serve it with its own base model"
            )


def _targets(config: DecoderConfig) -> set[str]:
    """Returns the names of the modules that adapters may change."""
    names, modules = config.names, set[str]()
    for layer in range(config.n_layers):
        found: list[str] = []
        if layer in config.attention_layers:
            found += [names.query, *stored_projections(config, layer), names.output]
        if config.has_plain_mlp(layer):
            found += [*([names.gate] if config.has_gate else []), names.up, names.down]
        modules.update(name.format(layer=layer) for name in found)
    return modules


def _why_not(module: str, config: DecoderConfig, shapes: TensorShapes) -> str:
    names = config.names
    if f"{module}.weight" not in shapes and not _is_of_experts(module, config):
        return (
            "the model has no such module, so this is an adapter of another model; serve it with its own base model"
        )
    if module in (names.embedding, names.head):
        return f"the embedding and the output head have no adapters in this release; {_USE}"
    if _is_of_experts(module, config):
        return f"experts and their routers have no adapters in this release; {_USE}"
    if config.recurrent is not None and any(
        module.startswith(names.recurrent.format(layer=layer)) for layer in config.recurrent.layers
    ):
        return f"recurrent layers have no adapters in this release; {_USE}"
    return f"this module has no adapters in this release; {_USE}"


def _is_of_experts(module: str, config: DecoderConfig) -> bool:
    """Returns whether a module is a router, an expert, or all experts."""
    if config.experts is None:
        return False
    names = config.names
    experts = names.expert_up.partition("{expert}")[0]
    parts = names.router, names.shared_gate, names.shared_up, names.shared_down, names.shared_weight, experts
    return any(
        module == (own := part.format(layer=layer).rstrip(".")) or module.startswith(f"{own}.")
        for part in parts
        for layer in range(config.n_layers)
    )
