"""The scales for a quantized KV cache that a checkpoint may have been calibrated with."""

from __future__ import annotations

import math

from radixkv.errors import CheckpointError
from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.safetensors import Header, TensorViews


class KVScales:
    """The tensors ``k_scale`` and ``v_scale`` of a checkpoint's layers, one number each.

    They are found beside the key and value projections of attention (compressed-tensors), or below them
    (``k_proj.k_scale``, AutoFP8).

    Args:
        config: of the model.
        files: of the checkpoint.
        stored: names of all tensors in the files.
    """

    def __init__(self, config: DecoderConfig, files: TensorViews, stored: frozenset[str]) -> None:
        self._files = files
        sources = [config.heads[layer].source for layer in config.attention_layers]
        self._names = [
            (
                _stored_name(config.names.key, "k_scale", owner, stored),
                _stored_name(config.names.value, "v_scale", owner, stored),
            )
            for layer, source in zip(config.attention_layers, sources, strict=True)
            for owner in [layer if source is None else source]
        ]

    @property
    def headers(self) -> dict[str, Header]:
        """Expected headers of the scales that there are."""
        return {
            name: Header((1,), may_be_scalar=True) for names in self._names for name in names if name is not None
        }

    def read(self) -> tuple[LayerScales, ...]:
        """Reads the scales of what each layer with attention reads; a scale that the checkpoint lacks is 1.

        Raises:
            CheckpointError: a scale is not a finite number above 0, or cannot be read.
        """
        return tuple(LayerScales(self._read(k), self._read(v)) for k, v in self._names)

    def _read(self, name: str | None) -> float:
        if name is None:
            return 1.0
        scale = float(self._files.view(name).float().item())
        if not 0.0 < scale < math.inf:  # also catches NaN
            raise CheckpointError(f"{name} is {scale:g}; a scale must be a finite number above 0")
        return scale


def _stored_name(projection: str, suffix: str, layer: int, stored: frozenset[str]) -> str | None:
    """Returns the name of a layer's scale; None if the checkpoint lacks it."""
    below = projection.format(layer=layer)
    names = (f"{below.rpartition('.')[0]}.{suffix}", f"{below}.{suffix}")
    return next((name for name in names if name in stored), None)
