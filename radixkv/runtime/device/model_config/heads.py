"""The heads of each layer's attention, as ``config.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from radixkv.runtime.device.model_config.config_reader import ConfigReader
from radixkv.runtime.device.model_config.families import Architecture


@dataclass(frozen=True)
class LayerHeads:
    """Keys and values of a layer's attention, and the size of all its heads."""

    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dimensions of each head that are rotated; 0 without a rotary embedding."""
    has_values: bool = True
    """Whether values have a projection; if not, they are what the keys' projection gives, before the keys' norm."""
    source: int | None = None
    """The layer whose K and V are read; None: the layer has its own."""


def parse_heads(
    fields: ConfigReader,
    architecture: Architecture,
    windows: Sequence[int | None],
    hidden_size: int,
    rotary_factor: float,
) -> tuple[int, tuple[LayerHeads, ...]]:
    """Returns the number of query heads, and the other heads of each layer.

    Args:
        fields: of ``config.json``.
        architecture: of the model.
        windows: [layers], None for full attention.
        hidden_size: of the model.
        rotary_factor: part of each head that is rotated.

    Raises:
        CheckpointError: a field is invalid or not supported.
    """
    n_heads = fields.count("num_attention_heads")
    default = architecture.default_n_kv_heads
    # As in Transformers, null means as many as query heads. The architecture's default is used only where it
    # divides the number of query heads.
    if default is None or n_heads % default or "num_key_value_heads" in fields:
        default = n_heads
    n_kv_heads = fields.count("num_key_value_heads", default)
    head_dim = fields.count("head_dim", architecture.default_head_dim or hidden_size // n_heads)
    sizes = [(n_kv_heads, head_dim)] * len(windows)
    is_key_value = False
    if architecture.default_full_head_dim is not None:
        is_key_value = fields.flag("attention_k_eq_v")
        sizes = _sizes_by_layer(fields, windows, (n_kv_heads, head_dim), architecture.default_full_head_dim)
    for n, size in sizes:
        if n_heads % n:
            raise fields.error(f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n}")
        if size % 2:
            raise fields.error(f"head_dim {size} is odd; rotary embedding needs an even one")
        n_rotated = int(size * rotary_factor)
        if n_rotated % 2 or (rotary_factor and not n_rotated):
            raise fields.error(
                f"partial_rotary_factor {rotary_factor:g} rotates {n_rotated} of the {size} dimensions of a head; "
                "rotary embedding needs an even number of them"
            )
    heads = [
        LayerHeads(n, size, int(size * rotary_factor), has_values=not (is_key_value and window is None))
        for (n, size), window in zip(sizes, windows, strict=True)
    ]
    return n_heads, _with_sources(fields, architecture, windows, heads)


def _sizes_by_layer(
    fields: ConfigReader, windows: Sequence[int | None], sizes: tuple[int, int], default_full_head_dim: int
) -> list[tuple[int, int]]:
    """Returns the number of KV heads and the head size of each layer, where those with full attention differ.

    Transformers 5.24 writes ``per_layer_config``, and earlier versions one size of all layers with full attention.
    """
    layers = fields.get("per_layer_config")
    if layers is None:
        n_full = sizes[0]
        if fields.flag("attention_k_eq_v"):
            n_full = fields.count("num_global_key_value_heads", n_full)
        full = n_full, fields.count("global_head_dim", default_full_head_dim)
        return [full if window is None else sizes for window in windows]
    by_layer = [sizes] * len(windows)
    if not isinstance(layers, Mapping):
        raise fields.error(f"per_layer_config is {layers!r}; it must be an object")
    names = {"num_key_value_heads", "head_dim"}
    for key, section in layers.items():
        if not key.isdecimal() or int(key) >= len(windows) or not isinstance(section, Mapping):
            raise fields.error(
                f"per_layer_config has {key!r}: {section!r}; it must map indices of layers to objects"
            )
        if more := section.keys() - names:
            raise fields.error(f"{min(more)} in per_layer_config is not supported in this release")
        layer = fields.nested(section)
        by_layer[int(key)] = layer.count("num_key_value_heads", sizes[0]), layer.count("head_dim", sizes[1])
    return by_layer


def _with_sources(
    fields: ConfigReader, architecture: Architecture, windows: Sequence[int | None], heads: Sequence[LayerHeads]
) -> tuple[LayerHeads, ...]:
    """Returns the heads, of which the last layers' read the K and V of the last layer of their kind before them."""
    n_shared = fields.count("num_kv_shared_layers", 0, minimum=0) if architecture.shares_kv else 0
    n_own = len(heads) - n_shared
    last = {windows[layer] is None: layer for layer in range(n_own)}
    shared = []
    for layer in range(max(n_own, 0), len(heads)):
        source = last.get(windows[layer] is None)
        if source is None or (heads[source].n_kv_heads, heads[source].head_dim) != (
            heads[layer].n_kv_heads,
            heads[layer].head_dim,
        ):
            raise fields.error(
                f"num_kv_shared_layers is {n_shared}; no layer before these has K and V for layer {layer}"
            )
        shared.append(replace(heads[layer], source=source))
    return *heads[: max(n_own, 0)], *shared
