"""The text model's configuration of a checkpoint that has other parts, such as vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_THE_WHOLE = ("architectures", "quantization_config", "tie_word_embeddings")
"""Fields whose value is that of the whole checkpoint, if it has one."""


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with the fields of its ``text_config`` beside the others; unchanged without one."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    whole = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    return {**config, **text, **whole}
