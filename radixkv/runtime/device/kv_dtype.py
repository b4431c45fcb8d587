"""How K and V are stored: their dtype, and the scales of quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of ``FP8``."""


class LayerScales(NamedTuple):
    """Scales of one layer: K and V are stored as ``k / scale``, and read as what is stored times the scale.

    One for all KV heads, as checkpoints have them.
    """

    k: float = 1.0
    v: float = 1.0


UNSCALED = LayerScales()
"""The scales of a layer without calibrated ones."""


def choose_kv_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of K and V for ``kv_cache_dtype`` and the dtype of activations."""
    return dtype if setting == "auto" else FP8


def kv_dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype of K and V, as settings have it: ``fp8_e4m3``, or torch's without ``torch.``."""
    return "fp8_e4m3" if dtype == FP8 else str(dtype).removeprefix("torch.")


def scales_text(dtype: torch.dtype, scales: Sequence[LayerScales]) -> str:
    """Returns the scales of all layers as text; empty if K and V of this dtype have none."""
    return "; ".join(f"{layer.k!r} {layer.v!r}" for layer in scales) if dtype == FP8 else ""


def quantize(values: Tensor, scale: float) -> Tensor:
    """Returns ``values / scale`` in ``FP8``, at most ``FP8_MAX`` in magnitude.

    What is not finite becomes NaN, so that it is noticed as it is without quantization.
    """
    scaled = values.float() / scale
    return torch.where(scaled.isfinite(), scaled.clamp(-FP8_MAX, FP8_MAX), torch.nan).to(FP8)
