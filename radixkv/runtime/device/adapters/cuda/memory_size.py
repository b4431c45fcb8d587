"""The memory that adapters take on a GPU, each in a slot."""

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
    return (max_loras + SPARE_SLOTS) * file_bytes(model, max_rank, dtype)


def file_bytes(model: DecoderConfig, rank: int, dtype: torch.dtype) -> int:
    """Returns the bytes of an adapter of all modules of a model; those of its file, if that has this dtype."""
    return rank * sum(map(sum, target_shapes(model).values())) * dtype.itemsize
