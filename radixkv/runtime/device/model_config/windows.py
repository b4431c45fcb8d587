"""The sliding window of each layer, as ``config.json`` describes it."""

from __future__ import annotations

from radixkv.runtime.device.model_config.config_reader import ConfigReader
from radixkv.runtime.device.model_config.families import Architecture

SLIDING, FULL = "sliding_attention", "full_attention"
"""Values of the field ``layer_types``."""


def parse_windows(fields: ConfigReader, architecture: Architecture, n_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for full attention."""
    windows = _listed_windows(fields, architecture, n_layers)
    return (*windows[:-1], None) if architecture.last_is_full else windows


def _listed_windows(fields: ConfigReader, architecture: Architecture, n_layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer as ``layer_types`` or a pattern has it."""
    window = _window(fields, architecture)
    layer_types = fields.get("layer_types")
    if architecture.window not in ("by_layer", "patterned"):
        only_type = FULL if window is None else SLIDING
        if layer_types is not None and layer_types != [only_type] * n_layers:
            raise fields.error(f"layer_types {layer_types!r} is not supported for this architecture")
        return (window,) * n_layers
    if window is None:
        return (None,) * n_layers
    if layer_types is None and architecture.window == "patterned":
        pattern = fields.count("sliding_window_pattern", architecture.default_window_pattern)
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(n_layers))
    if layer_types is None:
        first = fields.count("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(n_layers))
    if not isinstance(layer_types, list) or not all(name in (SLIDING, FULL) for name in layer_types):
        raise fields.error(f"layer_types is {layer_types!r}; it must be a list of {SLIDING!r} and {FULL!r}")
    if len(layer_types) != n_layers:
        raise fields.error(f"layer_types names {len(layer_types)} layers; num_hidden_layers is {n_layers}")
    return tuple(window if name == SLIDING else None for name in layer_types)


def _window(fields: ConfigReader, architecture: Architecture) -> int | None:
    """Returns the window of the layers that have one, None if no layer has one."""
    if architecture.window == "never":
        fields.allow_only(sliding_window=None)
        return None
    if architecture.window not in ("always", "patterned") and not fields.flag("use_sliding_window"):
        return None
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        if architecture.window == "patterned":
            raise fields.error("sliding_window is None; this architecture needs the size of its windows")
        return None
    if architecture.default_window is None and "sliding_window" not in fields:
        return None
    return fields.count("sliding_window", architecture.default_window)
