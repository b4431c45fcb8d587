"""Layers that are one half of others: what mixes tokens, or an MLP or experts (Nemotron-H)."""

from __future__ import annotations

from typing import Literal

from radixkv.runtime.device.model_config.config_reader import ConfigReader

Half = Literal["attention", "recurrent", "mlp", "experts"]

_PATTERN: dict[str, Half] = {"M": "recurrent", "*": "attention", "-": "mlp", "E": "experts"}
"""Letters of ``hybrid_override_pattern``."""
_NAMES: dict[str, Half] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "experts",
}
"""Names in ``layers_block_type``, of Transformers 5 and of earlier releases."""


def parse_halves(fields: ConfigReader, max_layers: int) -> tuple[Half, ...]:
    """Returns what each layer is.

    Raises:
        CheckpointError: neither field has a list, or a layer is none of these.
    """
    name = "layers_block_type"
    blocks, known = fields.get(name), _NAMES
    if blocks is None:
        name, known = "hybrid_override_pattern", _PATTERN
        blocks = fields.get(name)
    if not isinstance(blocks, str if known is _PATTERN else list) or not 0 < len(blocks) <= max_layers:
        raise fields.error(f"{name} is {blocks!r}; it must say what each of 1 to {max_layers} layers is")
    if unknown := [block for block in blocks if block not in known]:
        raise fields.error(
            f"{name} has a layer {unknown[0]!r}, which is not supported in this release; it supports "
            f"{', '.join(map(repr, known))}"
        )
    if "attention" not in (halves := tuple(known[block] for block in blocks)):
        raise fields.error(f"{name} has no attention; this release needs a layer with it")
    return halves
