"""The memory that adapters take on a GPU."""

from __future__ import annotations

import torch

from radixkv.runtime.device.adapters.targets import target_shapes
from radixkv.runtime.device.model_config.config import DecoderConfig

SPARE_SLOTS = 1
"""Slots beyond ``max_loras``: the next adapter is copied while requests of all others still run."""


def memory_bytes(model: DecoderConfig, max_loras: int, max_rank: int, dtype: torch.dtype) -> int:
    """Returns the memory of all slots for adapters on a GPU, whatever ranks and modules the adapters have.

    Args:
        model: the base model, or what a rank computes of it.
        max_loras: adapters that one step can have.
        max_rank: most ranks of an adapter.
        dtype: of activations.
    """
    n_values = sum(max_rank * sum(shape) for shape in target_shapes(model).values())
    return (max_loras + SPARE_SLOTS) * n_values * dtype.itemsize
